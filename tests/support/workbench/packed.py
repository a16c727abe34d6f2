"""A GGUF file of a micro Llama, small enough for every test, and the caches of such tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}


def micro_llama() -> LlamaForCausalLM:
    """Two layers with random weights, the same every time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


Tensors = dict[str, numpy.ndarray]
Arranged = Callable[[str, torch.Tensor], torch.Tensor]


def micro_tensors() -> Tensors:
    """Its weights, as a GGUF file names and arranges them."""
    weights = micro_llama().state_dict()
    return {_named(name): _permuted(name, x).numpy() for name, x in weights.items() if name != "lm_head.weight"}


def micro_gguf(
    path: Path,
    architecture: str = "llama",
    sizes: dict[str, int] | None = None,
    tensors: Tensors | None = None,
    stretched: tuple[str, float] | None = None,
) -> Path:
    """Its file, with weights as they are, a byte-level vocabulary and a chat template.

    sizes, tensors, stretched: what it says instead of the model's; of positions, how they are and by which factor.
    """
    writer, said = gguf.GGUFWriter(path, architecture), {**SHAPE, **(sizes or {})}
    writer.add_context_length(said["max_position_embeddings"])
    writer.add_embedding_length(said["hidden_size"])
    writer.add_feed_forward_length(said["intermediate_size"])
    writer.add_block_count(said["num_hidden_layers"])
    writer.add_head_count(said["num_attention_heads"])
    writer.add_head_count_kv(said["num_key_value_heads"])
    if "head_dim" in said:
        writer.add_key_length(said["head_dim"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(said["vocab_size"])
    _add_vocabulary(writer)
    if stretched is not None:
        writer.add_string(f"{architecture}.rope.scaling.type", stretched[0])
        writer.add_rope_scaling_factor(stretched[1])
    for name, values in (micro_tensors() if tensors is None else tensors).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_of(
    path: Path, architecture: str, model: Any, values: dict[str, Any], arranged: Arranged | None = None
) -> Path:
    """A model's file, with the names that the package gguf has for its weights.

    values: what the header says, by keys without the architecture; arranged: a weight as llama.cpp has it.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        add = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}[type(value)]
        add(f"{architecture}.{key}", value)
    _add_vocabulary(writer)
    known = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[architecture], values["block_count"])
    for name, x in model.state_dict().items():
        if name != "lm_head.weight":
            x = x if arranged is None else arranged(name, x)
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), x.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: gguf.GGUFWriter) -> None:
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<unk>", "<s>", "</s>", *letters, "ab"]
    tokens += [f"<extra{i}>" for i in range(SHAPE["vocab_size"] - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<") and len(token) > 1 else 1 for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)


def _named(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def _permuted(name: str, weight: torch.Tensor) -> torch.Tensor:
    """llama.cpp rotates pairs of neighbours, transformers the halves of a head."""
    heads = {"q_proj": SHAPE["num_attention_heads"], "k_proj": SHAPE["num_key_value_heads"]}
    count = next((n for part, n in heads.items() if part in name), None)
    if count is None:
        return weight
    rows, columns = weight.shape
    return weight.view(count, 2, rows // count // 2, columns).transpose(1, 2).reshape(rows, columns).contiguous()


def cut(path: Path, keep: float | int) -> None:
    """Leaves a file's first bytes: so many, or this share."""
    data = path.read_bytes()
    path.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
