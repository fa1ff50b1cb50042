"""generate() over a TurboQuantCache against decoding without pages, rings and our attention."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.cases import TORCH_DTYPES, rel_l2
from turboquant_rocm.integrations import transformers as tq
from turboquant_rocm.presets import load_yaml

MODEL_VARIABLE = "TURBOQUANT_MODEL"
"""Environment variable with the folder of the small model, as turboquant_rocm.evaluation.smollm2 writes it."""


MARGIN = {"fp32": 0.0, "fp16": 0.1, "bf16": 0.5}
"""Logits that rounding through 30 layers of that dtype may move."""
SHARE = {"fp16": 0.1, "bf16": 0.5}
"""Of the logits' change by quantising, what rounding in that dtype may add where both sides read the same bytes."""
CODE = 2e-3
"""Relative difference from which a vector is read back from other codes: norms in 16 bits move it by half of that."""


class OracleLayer(transformers.cache_utils.DynamicLayer):
    """Keys and values as the backend of ``bound`` reads them back, in transformers' own tensors.

    stored: a packed layer that has stored the same tokens; its bytes are then read, and ``apart`` has how far each
    vector is from what this layer would have stored. Without: from bytes of its own. In 16 bits that is no reference:
    a code that rounds the other way changes the next layer's keys, so that after 30 layers another order of the same
    sums is as far away as the unquantised cache.
    """

    def __init__(self, bound: Any, stored: tq.PackedLayer | None = None) -> None:
        super().__init__()
        self.bound = bound
        self.stored = stored
        self.apart: list[torch.Tensor] = []
        self.window = bound.layer.window
        self.is_sliding = self.window is not None

    def read_back(self, key: Any, value: Any) -> tuple[Any, Any]:
        batch, heads, queries, _ = key.shape
        count = batch * queries
        cache = self.bound.allocate(-(-count // self.bound.layout.block_size), key.device)
        flat = [x.permute(0, 2, 1, 3).reshape(count, heads, -1) for x in (key, value)]
        self.bound.store(*flat, cache, torch.arange(count, device=key.device))
        table = torch.arange(cache.num_blocks, dtype=torch.int32, device=key.device)[None]
        lengths = torch.tensor([count], dtype=torch.int32, device=key.device)
        read = self.bound.dequantize(cache, table, lengths, dtype=key.dtype)
        own = tuple(x.view(batch, queries, heads, -1).permute(0, 2, 1, 3) for x in read[:2])
        if self.stored is None:
            return own  # type: ignore[return-value]
        start = self.get_seq_length()
        end, other = start + queries, self.stored
        read = self.bound.dequantize(
            other.cache, other.table(end), other.lengths(end), starts=other.lengths(start), dtype=key.dtype
        )
        theirs = tuple(x.view(batch, queries, heads, -1).permute(0, 2, 1, 3) for x in read[:2])
        for mine, its in zip(own, theirs, strict=True):
            norm = its.float().norm(dim=-1)
            self.apart.append(((mine - its).float().norm(dim=-1) / norm).flatten())
        return theirs  # type: ignore[return-value]

    def update(self, key: Any, value: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        history, queries = self.get_seq_length(), key.shape[2]
        old = (self.keys, self.values)
        every = super().update(*self.read_back(key, value))
        if history == 0:
            return key, value
        if queries > tq.MAX_DECODE_ROWS:
            every = tuple(torch.cat([a, b], 2) for a, b in zip(old, (key, value), strict=True))
        if self.window is None:
            return every
        return tuple(x[:, :, -(self.window - 1 + queries) :] for x in every)  # type: ignore[return-value]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        start = 0 if self.window is None else max(0, self.get_seq_length() - self.window + 1)
        return self.get_seq_length() - start + query_length, start


def oracle(cache: tq.TurboQuantCache, stored: tq.TurboQuantCache | None = None) -> Any:
    """A cache of oracle layers with the bound layers of ``cache``, packed; over the bytes of ``stored`` if given."""
    others = [None] * len(cache.layers) if stored is None else stored.layers
    return transformers.Cache(
        layers=[OracleLayer(layer.bound, other) for layer, other in zip(cache.layers, others, strict=True)]
    )


def model_folder() -> Path | None:
    """The folder that the environment variable names; None without it."""
    named = os.environ.get(MODEL_VARIABLE)
    return Path(named) if named else None


def which_model() -> str:
    """What :func:`small_model` loads, for the output of a test."""
    return f"model: {model_folder() or f'random weights ({MODEL_VARIABLE} names no folder)'}"


def small_model(dtype: str, device: Any = "cpu", layers: int | None = None) -> Any:
    """The small model of the environment variable, or random weights of its architecture from a fixed seed.

    Random: ``layers`` of its 30, a smaller vocabulary, and weights large enough that attention decides the tokens.
    """
    folder = model_folder()
    if folder is not None:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    else:
        known = {
            k: v for k, v in load_yaml("models", "smollm2-135m.yaml")["config"].items() if k != "torch_dtype"
        }
        known["num_hidden_layers"] = layers or known["num_hidden_layers"]
        known.pop("model_type")
        config = transformers.LlamaConfig(
            **known, vocab_size=4096, intermediate_size=1536, tie_word_embeddings=False, initializer_range=0.08,
        )  # fmt: skip
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
    return model.to(device=device, dtype=TORCH_DTYPES[dtype]).eval()


def prompt_of(model: Any, count: int) -> torch.Tensor:
    """[1, count] random tokens from a fixed seed, on the model's device."""
    g = torch.Generator().manual_seed(1)
    return torch.randint(5, model.config.vocab_size, (1, count), generator=g).to(model.device)


STORY = """In 1851 the harbour town built its first lighthouse. The keeper, a quiet woman called Ada, climbed the stairs
every evening, trimmed the lamp and wrote the weather into a large book. One stormy night in October she saw a ship"""


def story(model: Any, count: int) -> torch.Tensor:
    """[1, count] tokens of English for the model of the folder; random ones for random weights.

    Random tokens bring a trained model to repeat one token for ever.
    """
    folder = model_folder()
    if folder is None:
        return prompt_of(model, count)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = tokenizer(STORY, add_special_tokens=False).input_ids[:count]
    assert len(ids) == count, f"a longer story: {len(ids)} tokens of {count}"
    return torch.tensor([ids], device=model.device)


@contextmanager
def beside_native() -> Iterator[dict[int, float]]:
    """Runs every attention over packed tokens a second time, in transformers, over the same tokens dequantised.

    Yields the largest relative errors by the number of queries, as they come in.
    """
    worst: dict[int, float] = {}

    def both(module: Any, query: Any, key: Any, value: Any, mask: Any, **more: Any) -> Any:
        want = None
        if isinstance(key, tq.PackedChunk):
            assert key.is_causal(mask)
            rest = {k: v for k, v in more.items() if k not in ("dropout", "scaling")}
            want, _ = tq.native_attention(
                module, query, *key.dense(), mask, more["dropout"], more["scaling"], **rest
            )
        found = tq.packed_attention(module, query, key, value, mask, **more)
        if want is not None:
            count = query.shape[2]
            worst[count] = max(worst.get(count, 0.0), rel_l2(found[0], want))
        return found

    transformers.AttentionInterface.register(tq.ATTENTION, both)
    try:
        yield worst
    finally:
        transformers.AttentionInterface.register(tq.ATTENTION, tq.packed_attention)


@torch.no_grad()
def forced(model: Any, ids: torch.Tensor, prompt: int, cache: Any) -> torch.Tensor:
    """Logits [n - prompt, V] fp32 for tokens prompt, prompt + 1 ... of ids [1, n]: the prompt first, then each."""
    found = [model(input_ids=ids[:, :prompt], cache=cache, use_cache=True).logits[0, -1]]
    for at in range(prompt, ids.shape[1] - 1):
        found.append(model(input_ids=ids[:, at : at + 1], cache=cache, use_cache=True).logits[0, -1])
    return torch.stack(found).float()


def check_generate(
    model: Any, mode: str, *, backend: str | None, dtype: str, target: Any, new: int = 64
) -> None:
    """``new`` greedy tokens of ``generate`` are those that the reference's decode ranks first, one by one.

    In fp32 each of them, by a reference that stores and reads for itself. In 16 bits the reference reads what the cache
    has stored, which must be what it would have stored but for codes on a tie, and up to 4 tokens may miss being first
    by ``MARGIN``, where another order of the same sums decides a near tie. backend: of the cache (None: the
    dispatcher's).
    """
    prompt, margin = 48, MARGIN[dtype]
    text = story(model, prompt)
    options: dict[str, Any] = {"dtype": dtype, "target": target, "protect": 0, "checks": "full"}
    plain = model.config._attn_implementation
    cache = tq.TurboQuantCache(model.config, "turboquant_4bit_nc", backend, **options)
    assert len(cache.packed_layers) == model.config.num_hidden_layers
    if backend is not None:
        assert {layer.bound.backend for layer in cache.layers} == {backend}
    settings = transformers.GenerationConfig(
        max_new_tokens=new, do_sample=False, pad_token_id=0, output_logits=True, return_dict_in_generate=True
    )
    if mode == "direct":
        model.set_attn_implementation(tq.ATTENTION)
    try:
        made = model.generate(
            text, attention_mask=torch.ones_like(text), cache=cache, generation_config=settings
        )
    finally:
        model.set_attn_implementation(plain)
    ids, found = made.sequences, torch.cat(made.logits).float()
    assert ids.shape == (1, prompt + new)
    assert len(set(ids[0, prompt:].tolist())) > 4  # one token for ever would prove little
    layout = cache.layers[0].bound.layout.name
    reference = oracle(
        tq.TurboQuantCache(model.config, "turboquant_4bit_nc", "torch_reference", layout=layout, **options),
        cache if margin else None,
    )
    logits = forced(model, ids, prompt, reference)
    missed = logits.amax(-1) - logits.gather(1, ids[0, prompt:, None])[:, 0]
    exact = forced(model, ids, prompt, transformers.DynamicCache(config=model.config))
    error, effect = (rms(x[1:] - logits[1:]) for x in (found, exact))
    apart = [torch.cat(layer.apart) for layer in reference.layers if layer.apart]
    print(
        f"{cache.layers[0].bound.backend} {mode} {dtype}: logits {error:.4f} from the reference's, quantising moves "
        f"them by {effect:.4f}; {int((missed > 0).sum())} tokens missed by at most {missed.max():.4f}; vectors apart "
        f"by {[f'{x.mean():.4f}' for x in (*apart[:1], *apart[-1:])]} in the first and last layer"
    )
    assert missed.max() <= margin, missed
    assert (missed > 0).sum() <= (4 if margin else 0), missed
    # and the cache is a quantised one: exact keys and values give other logits
    assert (exact[1:] - logits[1:]).norm() > 1e-3 * exact[1:].norm()
    assert torch.allclose(
        exact[0], logits[0], rtol=1e-3, atol=max(margin, 1e-3)
    )  # the prompt's attention is exact
    if margin:
        assert error < SHARE[dtype] * effect
        assert (apart[0] > CODE).float().mean() < 0.02, "of the same keys and values only ties may differ"
        assert max(x.mean() for x in apart) < 0.05, "a half of what quantising changes"


def rms(x: torch.Tensor) -> float:
    """Root of the mean square."""
    return float(x.square().mean().sqrt())
