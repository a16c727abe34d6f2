"""Native Sparse Attention: values and gradients against dense masks, query by query, in float64."""

import pytest
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from logitless.errors import ConfigError, OptionError
from logitless.models.instances import checkpoint_layers
from logitless.models.nsa import attention
from logitless.models.nsa.attention import nsa
from logitless.models.nsa.layers import NAME, attach, documents, padding
from logitless.models.nsa.options import NSAOptions, options_of
from logitless.models.nsa.saved import load, load_parameters
from logitless.models.nsa.selected import selected_attention
from tests.support.allocations import largest_allocation, peak_new_bytes

SMALL = NSAOptions(block=8, stride=4, selected_block=16, selected=4, window=10)
WIDE = NSAOptions(block=32, stride=8, selected_block=16, selected=4, window=3)


def dense_branch(query, key, value, sees, scaling):
    scores = (query @ key.mT * scaling).masked_fill(~sees, -torch.inf)
    weights = torch.where(sees.any(-1, keepdim=True), torch.softmax(scores, -1), 0.0)
    return weights, weights @ value


def naive(query, key, value, compressed_key, compressed_value, gates, scaling, options):
    """The definition with loops over heads and queries and masks over all keys."""
    heads, length, _ = query.shape
    keys, group = key.shape[1], heads // key.shape[0]
    rows = []
    for h in range(key.shape[0]):
        own = range(h * group, (h + 1) * group)
        for t in range(length):
            position = keys - length + t
            ends = torch.arange(compressed_key.shape[1]) * options.stride + options.block
            some = ends <= position + 1
            branches = [[] for _ in own]
            importance = torch.zeros(-(-keys // options.selected_block), dtype=query.dtype)
            for i, q in enumerate(own):
                weights, out = dense_branch(query[q, t], compressed_key[h], compressed_value[h], some, scaling)
                branches[i].append(out)
                for block, weight in enumerate(weights.detach()):
                    for token in range(block * options.stride, block * options.stride + options.block, options.stride):
                        importance[token // options.selected_block] += weight
            here = position // options.selected_block
            importance[here + 1 :] = -torch.inf
            for forced in {0, here, max(here - 1, 0)}:
                importance[forced] = torch.inf
            chosen = [b for b in importance.topk(min(options.selected, len(importance))).indices.tolist() if b <= here]
            token = torch.arange(keys)
            selected = torch.isin(token // options.selected_block, torch.tensor(chosen)) & (token <= position)
            near = (token <= position) & (token > position - options.window)
            for i, q in enumerate(own):
                branches[i] += [dense_branch(query[q, t], key[h], value[h], s, scaling)[1] for s in (selected, near)]
                rows.append(sum(gates[b, q, t] * out for b, out in enumerate(branches[i])))
    ordered = [rows[(h // group * length + t) * group + h % group] for h in range(heads) for t in range(length)]
    return torch.stack(ordered).unflatten(0, (heads, length))


def problem(keys, queries, heads, kv_heads, options, dim=6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(keys)
    blocks = options.compressed(keys)
    shapes = (
        (heads, queries, dim), (kv_heads, keys, dim), (kv_heads, keys, dim), (kv_heads, blocks, dim),
        (kv_heads, blocks, dim), (3, heads, queries),
    )  # fmt: skip
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize(
    ("keys", "queries", "heads", "kv_heads", "options"),
    [
        (1, 1, 2, 1, SMALL),
        (7, 7, 2, 2, SMALL),  # shorter than one block
        (16, 16, 4, 2, SMALL),
        (131, 131, 4, 2, SMALL),
        (131, 3, 4, 1, SMALL),  # the last queries of a cached sequence
        (97, 97, 2, 1, WIDE),
        (5, 5, 2, 1, WIDE),  # a compressed block longer than a selected one
    ],
)
@pytest.mark.parametrize("chunk_bytes", [1, 40_000, 64 << 20])
def test_values_and_gradients_equal_the_definition(keys, queries, heads, kv_heads, options, chunk_bytes, monkeypatch):
    monkeypatch.setattr(attention, "CHUNK_BYTES", chunk_bytes)
    tensors = problem(keys, queries, heads, kv_heads, options)
    ours = nsa(*tensors, 0.7, options)
    theirs = naive(*tensors, 0.7, options)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(ours)
    found = torch.autograd.grad(ours, tensors, upstream)
    wanted = torch.autograd.grad(theirs, tensors, upstream, allow_unused=True)
    for a, b, tensor in zip(found, wanted, tensors, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(tensor) if b is None else b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_that_of_the_dtype(dtype):
    exact = problem(70, 70, 4, 2, SMALL)
    rounded = [t.detach().to(dtype).requires_grad_() for t in exact]
    wanted = naive(*(t.detach().double() for t in rounded), 0.5, SMALL)
    assert (nsa(*rounded, 0.5, SMALL).double() - wanted).abs().max() < 8 * torch.finfo(dtype).eps * wanted.abs().max()


def test_sums_over_chunks_are_no_less_exact_than_one_chunk(monkeypatch):
    """Every chunk adds to the compressed values' gradients, here with one sign."""
    *tensors, gates = (t.detach().bfloat16().requires_grad_() for t in problem(512, 512, 2, 1, SMALL))
    gates = gates.detach().abs()
    exact = [t.detach().double().requires_grad_() for t in tensors]
    wanted = torch.autograd.grad(nsa(*exact, gates.double(), 0.1, SMALL).sum(), exact)
    monkeypatch.setattr(attention, "CHUNK_BYTES", 1)  # one query a chunk
    found = torch.autograd.grad(nsa(*tensors, gates, 0.1, SMALL).sum(), tensors)
    for a, b in zip(found, wanted, strict=True):
        assert (a.double() - b).norm() < 0.01 * b.norm()


def test_memory_is_linear_in_the_context(monkeypatch):
    monkeypatch.setattr(attention, "CHUNK_BYTES", 1 << 20)
    options, keys = NSAOptions(selected=4, window=64), 4096
    tensors = problem(keys, keys, 2, 1, options, dim=8, dtype=torch.float32)
    assert largest_allocation(lambda: nsa(*tensors, 1.0, options).sum().backward()) < keys * keys / 4


def test_backward_holds_no_second_copy_of_its_sums():
    """Gradients replace them one by one; beside them are the keys' and values' of the selected branch."""
    options = NSAOptions(selected=4, window=64)
    tensors = problem(16_384, 4, 1, 1, options, dim=64, dtype=torch.bfloat16)
    _, key, value, *_ = tensors
    result = nsa(*tensors, 0.5, options).sum()
    sums = sum(2 * t.nbytes for t in tensors[1:5])
    peak = peak_new_bytes(lambda: torch.autograd.grad(result, tensors))
    assert peak < sums + 1.5 * (key.nbytes + value.nbytes) + key.nbytes / 4


def model_and_ids(length=60, seed=0):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, intermediate_size=64, max_position_embeddings=512,
    )  # fmt: skip
    model = attach(AutoModelForCausalLM.from_config(config, dtype=torch.float64), SMALL).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".nsa." in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model, torch.randint(0, 128, (2, length))


def test_packed_documents_are_those_documents_by_themselves():
    model, ids = model_and_ids()
    positions = torch.cat([torch.arange(23), torch.arange(30), torch.arange(7)]).expand(2, -1)
    packed = model(input_ids=ids, position_ids=positions).logits
    apart = [model(input_ids=part).logits for part in ids.split([23, 30, 7], dim=1)]
    torch.testing.assert_close(packed, torch.cat(apart, dim=1))


def test_every_parameter_has_a_gradient_where_nothing_is_compressed():
    """Ranks whose documents are short reduce the same gradients as ranks whose documents are long."""
    model, ids = model_and_ids(length=SMALL.block - 1)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    assert missing == []
    assert all((p.grad == 0).all() for name, p in model.named_parameters() if "compress" in name)


def test_generation_with_a_cache_and_padding_equals_whole_forwards():
    model, ids = model_and_ids(20)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    text = model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False, pad_token_id=0)
    for row, begin in ((0, 7), (1, 0)):
        whole = model(input_ids=text[row : row + 1, begin:]).logits[0]
        assert whole[19 - begin : -1].argmax(-1).tolist() == text[row, 20:].tolist()


def test_a_cache_of_static_length_gives_the_same_tokens():
    model, ids = model_and_ids(20)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    for more in ({}, {"attention_mask": mask}):
        wanted = model.generate(ids, **options, **more)
        assert torch.equal(model.generate(ids, cache_implementation="static", **options, **more), wanted)


@pytest.mark.parametrize("mask", [torch.tensor([[1] * 10 + [0] * 4 + [1] * 16, [1] * 30]), torch.ones(2, 1, 30, 30)])
def test_masks_that_would_be_misread_are_refused(mask):
    """One with padding between a row's tokens, and one of pairs of tokens."""
    model, ids = model_and_ids(30)
    with pytest.raises(ConfigError, match="nsa: expected an attention_mask"):
        model(input_ids=ids, attention_mask=mask)


def test_training_under_autocast_is_near_to_training_in_fp32():
    """Its norms and their weights are fp32, what its matrices give is not."""
    model, ids = model_and_ids()
    gradients = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = model.float()(input_ids=ids, labels=ids, use_cache=False).loss
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*model.parameters()])]))
    exact, rounded = gradients
    assert (rounded - exact).norm() < 0.05 * exact.norm()


def test_autocast_leaves_the_selected_scores_alone():
    """Backward computes them again: rounded ones would be of other probabilities."""
    query, key, value = (torch.randn(h, 48, 16).bfloat16().mul_(3).requires_grad_() for h in (4, 2, 2))
    blocks = torch.arange(3).expand(2, 48, 3)
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = selected_attention(query, key, value, blocks, 16, 1.0)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), [query, key, value])])
    assert all(map(torch.equal, *found))


def test_checkpointed_layers_give_the_same_gradients():
    found = []
    for checkpointed in (False, True):
        model, ids = model_and_ids()
        if checkpointed:
            checkpoint_layers(model)
        model.train()(input_ids=ids, labels=ids).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert all(p is not None and p.abs().sum() > 0 for name, p in found[0].items() if ".nsa." in name)
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient)


def test_a_saved_model_comes_back(tmp_path):
    model, ids = model_and_ids()
    for folder in ("", "inner"):
        model.save_pretrained(tmp_path / folder)
        found = load(tmp_path, dtype=torch.float64, subfolder=folder)
        torch.testing.assert_close(found(ids).logits, model(ids).logits)
        (tmp_path / "model.safetensors").unlink(missing_ok=True)


def test_transformers_alone_refuses_a_saved_model(tmp_path, monkeypatch):
    """Rather than to compute full attention with its weights, as it would without a word."""
    model, ids = model_and_ids()
    model.save_pretrained(tmp_path)
    without = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)  # this process knows the attention
    with pytest.raises(ConfigError, match=r"loaded without its parameters; logitless\.models\.nsa\.saved\.load"):
        without(ids)
    monkeypatch.delitem(AttentionInterface._global_mapping, NAME)
    with pytest.raises(ValueError, match=f'attn_implementation="{NAME}"` is not supported'):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_saved_model_of_a_hub_id_comes_back(tmp_path, monkeypatch):
    """From a cache of the hub's, as it lies there once two revisions of a model have been loaded."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    place = tmp_path / "models--some--sparse"
    (place / "refs").mkdir(parents=True)
    saved = {}
    for seed, revision in enumerate(("main", "v2")):
        saved[revision] = model_and_ids(seed=seed)
        saved[revision][0].save_pretrained(place / "snapshots" / (str(seed) * 40))
        (place / "refs" / revision).write_text(str(seed) * 40)
    for revision, (model, ids) in saved.items():
        found = load("some/sparse", dtype=torch.float64, cache_dir=tmp_path, revision=revision)
        torch.testing.assert_close(found(ids).logits, model(ids).logits)
    with pytest.raises(ConfigError, match="some/other: its weights cannot be had"):
        load_parameters(AutoModelForCausalLM.from_config(model.config, attn_implementation="sdpa"), "some/other")


def test_of_a_hub_id_the_weights_of_its_folder_alone_are_fetched(tmp_path, monkeypatch):
    model, ids = model_and_ids()
    model.save_pretrained(tmp_path / "inner")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "inner", dtype=torch.float64, attn_implementation="sdpa")
    patterns = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, allow_patterns: patterns.append(allow_patterns) or tmp_path
    )
    found = load_parameters(plain, "some/sparse", subfolder="inner/")
    assert patterns == ["inner/*.safetensors"]
    torch.testing.assert_close(found(ids).logits, model(ids).logits)


def test_weights_without_nsa_are_named(tmp_path):
    model, _ = model_and_ids()
    state = {name: tensor for name, tensor in model.state_dict().items() if ".nsa." not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    with pytest.raises(ConfigError, match=r"names nsa, but its weights have no model\.layers\.0\.self_attn\.nsa"):
        load_parameters(plain, tmp_path)


def test_documents_of_a_batch():
    key = torch.zeros(2, 1, 6, 4)
    mask = torch.tensor([[False, False, True, True, True, True], [True, True, True, True, False, False]])
    assert documents(mask, None, key, 6) == [(0, 2, 6), (1, 0, 4)]
    assert documents(None, None, key, 6) == [(0, 0, 6), (1, 0, 6)]
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    assert documents(None, positions, key, 6) == [(0, 0, 3), (0, 3, 5), (0, 5, 6), (1, 0, 6)]
    assert documents(None, torch.tensor([[5]]), key, 1) == [(0, 0, 6), (1, 0, 6)]


def test_the_sizes_of_a_configuration():
    """The paper's, where it names none."""
    usual = {"block": 32, "stride": 16, "selected_block": 64, "selected": 16, "window": 512}
    config = AutoConfig.for_model("qwen3")
    assert options_of(config).to_dict() == usual
    config.nsa = {"window": 64}
    assert options_of(config).to_dict() == usual | {"window": 64}
    for wrong in ({"window": 64.0}, {"window": True}, {"width": 64}, [64]):
        config.nsa = wrong
        with pytest.raises(ConfigError, match=r"nsa: expected whole numbers for some of block, .* got [{\[]"):
            options_of(config)


def test_how_many_blocks_and_queries():
    """The first block and the two nearest at least; as many queries at once as fit, three numbers for each key."""
    assert [NSAOptions(selected=1).blocks_of_a_query(keys) for keys in (64, 65, 10_000)] == [1, 2, 3]
    options, keys, budget = NSAOptions(), 4096, 1 << 20
    each = 3 * 4 * 2 * ((keys - 32) // 16 + 1 + 512)
    count = options.chunk(2, keys, budget)
    assert count * each <= budget < (count + 1) * each
    assert [options.chunk(2, keys, size) for size in (1, 1 << 40)] == [1, 512]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": 30}, "nsa block must be a multiple of stride 16, got 30"),
        ({"selected_block": 40}, "nsa selected_block must be a multiple of stride 16, got 40"),
        ({"window": 0}, "nsa window must be at least 1, got 0"),
    ],
)
def test_sizes_without_a_meaning(change, message):
    with pytest.raises(OptionError, match=message):
        NSAOptions(**change).check()


def test_models_of_another_shape_are_refused_and_left_alone():
    config = AutoConfig.for_model("gpt2", n_embd=16, n_layer=1, n_head=2, vocab_size=32)
    other = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match="no attention layers of q_proj"):
        attach(other)
    assert not any(".nsa." in name for name, _ in other.named_parameters())
    model, _ = model_and_ids()
    with pytest.raises(ConfigError, match="has nsa already"):
        attach(model)


def test_attention_dropout_is_refused():
    model, ids = model_and_ids()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ConfigError, match="no attention dropout, got"):
        model.train()(input_ids=ids)


def test_a_mask_as_older_transformers_ask_for_it():
    """Before 5.4 they named the places in the cache."""
    given = {"batch_size": 2, "device": torch.device("cpu")}
    for more in ({"q_length": 3, "q_offset": 4}, {"cache_position": torch.arange(4, 7)}):
        assert padding(kv_length=12, **given, **more).tolist() == [[True] * 7] * 2
        assert padding(kv_length=7, **given, **more) is None
