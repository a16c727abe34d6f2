"""Finding a language model's body and output head beneath its wrappers, and computing inside the head's own call."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...errors import ConfigError
from ...vocab.face import LMHead, transforms_of_model, unwrapped

T = TypeVar("T")

STATE = "_logitless"  # what `install` leaves in a model
OBSERVER = "_logitless_observer"
PROBE = "_logitless_probe"  # what `captured` leaves in a model: a probe, and what the model made of it
COMPILED = "_compiled_call_impl"  # what `module.compile()` leaves in a module
SHARDED = ("full_tensor", "_fsdp_flattened", "ds_id")  # weights of FSDP and ZeRO-3: whole only while the model runs
FSDP_UNIT = "unshard"  # a method of modules that FSDP2 gathers and shards by their own calls
LOSS_INPUTS = ("labels", "shift_labels", "num_items_in_batch")


_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
# Models that are known to change their logits as their LMHead says, and the scale, softcap and rows that it said then.
VERIFIED: WeakKeyDictionary[nn.Module, tuple[float, float | None, int | None]] = WeakKeyDictionary()
_lock = threading.Lock()


@contextmanager
def alone(model: nn.Module) -> Iterator[None]:
    """While it lasts, other threads wait where they would compute with this model's head otherwise than it does.

    What they call the model for as it is goes on: stand-ins are of the thread that put them there.
    """
    if torch.compiler.is_compiling():
        yield
        return
    with _lock:
        lock = _LOCKS.setdefault(causal_lm(model), threading.RLock())
    with lock:
        yield


def this_thread() -> int:
    """Its number; 0 in a graph, which one thread runs."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def causal_lm(model: nn.Module) -> Any:
    """The transformers model that owns the output head, beneath PEFT and every other wrapper. Raises ConfigError."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"expected a transformers model, got {type(model).__name__}")
    inner: Any = unwrapped(model)
    if not hasattr(inner, "get_output_embeddings"):
        raise ConfigError(
            f"expected a transformers model, got {type(inner).__name__} without get_output_embeddings(); "
            "use LMHead and linear_cross_entropy for a model of your own"
        )
    return inner


def output_head(model: nn.Module) -> nn.Module:
    """The module that turns hidden states into logits, wrapped as it is. Raises ConfigError where there is none."""
    inner = causal_lm(model)
    head = inner.get_output_embeddings()
    if head is None:
        raise ConfigError(f"{type(inner).__name__} has no output head; load the ...ForCausalLM class")
    return head


def entries_of(model: Any, head: Any) -> int:
    """How many logits a model's head returns: its vocabulary, or less where only a part of it can be predicted."""
    vocab = model.config.get_text_config().vocab_size
    return min(vocab, getattr(head, "out_features", vocab))


def cache_name(model: nn.Module) -> str:
    """What a model's forward calls the keys and values that it goes on from: since transformers 5.24 `cache`."""
    found = inspect.signature(type(causal_lm(model)).forward).parameters.get("cache")
    return "past_key_values" if found is None or "dict" in str(found.annotation) else "cache"  # XLM has a dict


def head_of(model: Any) -> LMHead:
    """The head of a causal LM, within `captured` held against what the model made of its probe. Raises ConfigError."""
    found = LMHead.of(model)
    if PROBE in model.__dict__:
        verify(model, found, *model.__dict__[PROBE])
    return found


def through_head(model: nn.Module, compute: Callable[..., T], hidden: Tensor, *tensors: Tensor | None) -> T:
    """`compute(LMHead, hidden, *tensors)`, run inside the forward call of the model's own output head.

    Dense equivalent:

        compute(LMHead.of(model), hidden, *tensors)

    The hooks of the head's call fire as for any other call: FSDP2 and DeepSpeed ZeRO-3 gather the weight before,
    gather it again for backward, and reduce its gradient across ranks, also where the head, or a part of it such as an
    adapter's factor, is a unit of its own.
    (Outside, `weight.full_tensor()` gives every rank the gradient of its own tokens only.)
    hidden: (..., H), what the head is called with; tensors: labels and the like, moved to the head's device and
    hidden from the hooks, which might round them. Returns compute's result: tensors, or tuples, lists, dicts or
    dataclasses of tensors, which is what the hooks look into. Call it where the model would call its head, once,
    within the forward of the wrapped model (`forward_with`): a second call frees what FSDP2 grouped with the head.
    Raises ConfigError, and what `compute` raises.
    """
    inner = causal_lm(model)

    def forward(hidden: Tensor, **given: Any) -> T:
        if given:
            raise ConfigError(
                f"the output head was called with {', '.join(given)}, expected hidden states alone; "
                "give a batch one adapter (set_adapter), or leave the head out of the adapters"
            )
        found = head_of(inner)
        device = found.weight.device
        if device.type == "meta" != hidden.device.type:
            raise ConfigError(
                f"the output head's weight is offloaded (on meta), expected it on {hidden.device}; "
                "leave the head out of cpu_offload, disk_offload or device_map"
            )
        given_to = (hidden.to(device), *(x if x is None else x.to(device) for x in tensors))
        return compute(found, *given_to)

    with alone(inner):
        head, run = output_head(inner), forward
        for part in head.modules():
            if part is not head and hasattr(part, FSDP_UNIT):
                run = _within(part, run)
        return _within(head, run)(hidden)


def _within(module: nn.Module, forward: Callable[..., T]) -> Callable[..., T]:
    """`forward`, run inside the module's own call."""

    def call(hidden: Tensor, **given: Any) -> T:
        with standing_in(module, forward):
            return module(hidden, **given)

    return call


def forward_with(model: nn.Module, batch: dict[str, Any], end: Callable[[Any, Tensor], T], probed: bool = True) -> T:
    """Runs the wrapped model on `batch` with another ending: `end(causal_lm, hidden)` in the place of head and loss.

    Dense equivalent:

        end(causal_lm(model), causal_lm(model).base_model(**batch).last_hidden_state)

    It runs within the forward of the model and all of its wrappers (DDP, FSDP, DeepSpeed, PEFT), so that parameters
    are gathered and gradients reduced; what torch.compile made of it is passed by. hidden: (B, T, H), what the head
    eats of the batch's own tokens, not of a soft prompt that PEFT puts before them. Labels in the batch are left out.
    probed: as `captured`; needless where `end` asks for no LMHead.
    Raises ConfigError.
    """
    inner = causal_lm(model)

    def forward(*args: Any, **kwargs: Any) -> T:
        with captured(inner, dense, *args, probed=probed, **kwargs) as (hidden, _):
            return end(inner, hidden[:, max(0, _length(kwargs) - _length(given)) :])

    given = {name: x for name, x in batch.items() if name not in LOSS_INPUTS}
    if "use_cache" in inspect.signature(type(inner).forward).parameters:
        given.setdefault("use_cache", False)  # a cache makes transformers forget the packed mask
    with alone(inner):
        dense = inner.forward
        with standing_in(model, forward):
            return model(**given)


def _length(given: Mapping[str, Any]) -> int:
    """How many tokens a row of a call has."""
    tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
    return tokens.shape[1] if isinstance(tokens, Tensor) else 0


@contextmanager
def observed(model: nn.Module, look: Callable[..., None]) -> Iterator[None]:
    """While it lasts, `look` gets what `observe` is told."""
    with replaced(causal_lm(model), OBSERVER, look):
        yield


def observe(model: nn.Module, head: LMHead, hidden: Tensor, targets: Tensor) -> None:
    """Tells whoever looks (`observed`) what a loss is computed of: the head, its input and what each row predicts."""
    look = causal_lm(model).__dict__.get(OBSERVER)
    if look is not None:
        look(head, hidden, targets)


class HiddenCapture:
    """Stands where a head stood until it is called: captures the hidden states, and puts the head back.

    In the place of logits it returns those of no position, or a probe (1, 1, V) of what the model does to logits.
    """

    def __init__(self, owner: nn.Module, name: str, vocab: int, probed: bool) -> None:
        self.owner, self.name, self.vocab, self.probed = owner, name, vocab, probed
        self.thread = this_thread()
        self.head: Any = owner._modules[name]
        self.seen: Tensor | None = None
        self.probe: Tensor | None = None
        self.of_loss = False  # of the installed forward: another call of it is one of a hook
        self.gave_loss = False  # of the installed forward: its loss function was called

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["head"], name)  # some models ask for the head's dtype

    def __call__(self, hidden: Tensor, *given: Any, **more: Any) -> Tensor:
        if this_thread() != self.thread:
            return self.head(hidden, *given, **more)
        self.seen = hidden
        self.put_back()
        if self.probed:
            self.probe = torch.linspace(-20, 20, self.vocab, device=hidden.device)[None, None]
            return self.probe.clone()
        return hidden.new_zeros((*hidden.shape[:-2], 0, self.vocab))

    def hidden(self) -> Tensor:
        if self.seen is None:
            raise ConfigError(f"expected a model that calls its output head {self.name!r} in forward, it never did")
        return self.seen

    def put_back(self) -> None:
        self.owner._modules[self.name] = self.head


@contextmanager
def capturing_hidden(model: Any, probed: bool) -> Iterator[HiddenCapture]:
    """While it lasts, the causal LM's head computes nothing: what it is called with is captured.

    probed: returns what `verify` compares, where nobody has yet.
    """
    probed = probed and not (torch.compiler.is_compiling() or VERIFIED.get(model) == transforms_of_model(model))
    with alone(model):
        head = output_head(model)
        owner, name = next(
            (parent, name) for parent in model.modules() for name, child in parent._modules.items() if child is head
        )
        stand_in = HiddenCapture(owner, name, entries_of(model, head), probed)
        owner._modules[name] = stand_in  # type: ignore[assignment]
        try:
            yield stand_in
        finally:
            stand_in.put_back()


@contextmanager
def captured(
    model: Any, forward: Callable[..., T], *args: Any, probed: bool = True, **kwargs: Any
) -> Iterator[tuple[Tensor, T]]:
    """(What the model's forward calls its head with, what it returns without logits, never as a tuple).

    While it lasts, and where probed, `through_head` and `head_of` raise ConfigError where the model changes its logits
    otherwise than its LMHead says.
    """
    if "return_dict" in kwargs or not getattr(model.config, "return_dict", True):
        kwargs["return_dict"] = True  # a tuple does not say which of it are the logits
    with capturing_hidden(model, probed) as seen:
        output = forward(*args, **kwargs)
    with replaced(model, PROBE, (seen.probe, getattr(output, "logits", None))):
        yield seen.hidden(), output


def verify(model: Any, head: LMHead, probe: Tensor | None, logits: Tensor | None) -> None:
    """ConfigError where the model makes other logits of the probe than its LMHead does; once for what that says."""
    if probe is None or logits is None:
        return
    z = head.scale * probe[..., : head.rows]
    z = head.softcap * (z / head.softcap).tanh() if head.softcap else z
    logits = logits.to(z.device)  # accelerate's hooks have moved them to where the input was
    if logits.shape != z.shape or not bool(((logits - z).abs() <= 0.01 * (1 + z.abs())).all()):
        raise ConfigError(
            f"{type(model).__name__} changes its logits otherwise than by scale {head.scale:g} and softcap "
            f"{head.softcap}: pass hidden_states and an LMHead of your own to linear_cross_entropy"
        )
    VERIFIED[model] = transforms_of_model(model)


@contextmanager
def called_again(model: Any) -> Iterator[None]:
    """While it lasts, a model that a hook calls on the way to a loss of it has its own head."""
    stand_in = None if torch.compiler.is_compiling() else output_head(model)
    if not isinstance(stand_in, HiddenCapture) or not stand_in.of_loss or stand_in.thread != this_thread():
        yield
        return
    stand_in.put_back()
    try:
        yield
    finally:
        stand_in.owner._modules[stand_in.name] = stand_in  # type: ignore[assignment]


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """While it lasts, the instance has an attribute of its own; `module(...)` fires the hooks around a new forward."""
    own = module.__dict__  # rather than setattr: torch.compile follows this
    had, before = name in own, own.get(name)
    own[name] = value
    try:
        yield
    finally:
        if had:
            own[name] = before
        else:
            del own[name]


def adapter_configs(model: nn.Module) -> list[Any]:
    """What PEFT's wrappers of a model, or in it, say of their active adapters."""
    found = (getattr(part, "active_peft_config", None) for part in model.modules())
    return [config for config in found if config is not None]


@contextmanager
def standing_in(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """While it lasts, this thread's calls of the module, wrapped as it is, run `forward`, and others' what they ran.

    Graphs that torch.compile made of the module or of a wrapper are passed by: they would be made anew of `forward`.
    """
    inner: Any = unwrapped(module)
    if torch.compiler.is_compiling():
        with replaced(inner, "forward", forward):
            yield
        return
    usual, thread = inner.forward, this_thread()

    @functools.wraps(forward)
    def of_this_thread(*args: Any, **kwargs: Any) -> Any:
        return (forward if this_thread() == thread else usual)(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(replaced(inner, "forward", of_this_thread))
        for part in module.modules():
            if "_orig_mod" in part._modules:
                stack.enter_context(replaced(part, "forward", part._modules["_orig_mod"]))
            if part.__dict__.get(COMPILED) is not None:
                stack.enter_context(replaced(part, COMPILED, None))
            if part is inner:
                break
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """While it lasts, no dropout and no checkpointing; each module returns to the mode it had."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
