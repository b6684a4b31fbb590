"""Every family and every switch of its config: logits of a cut model are those of transformers, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from splitlm.core.cut import make_cut
from splitlm.core.errors import CheckpointError, ModelError, UnknownFamilyError
from splitlm.model import family as family_module
from splitlm.model.family import FAMILIES, find_family
from splitlm.model.load import ModelFiles
from splitlm.model.sizes import ModelShape
from splitlm.model.skeleton import compute_buffers
from splitlm.model.stage import build_stages
from tests.model.made import PROMPT, chain, edit_config, edit_tensors, make, same_as_uncut
from tests.tiny import COMMON, CONTEXT, GEMMA2_LAYERS, WINDOW
from tests.tiny import FAMILIES as TINY

SLIDING = {**COMMON, "sliding_window": WINDOW, "layer_types": GEMMA2_LAYERS}
GPT2 = TINY["gpt2"][1]


def rope(kind: str, **more: object) -> dict[str, object]:
    return {**COMMON, "rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **more}}


LONG = {"original_max_position_embeddings": 64, "short_factor": [1.0] * 8, "long_factor": [1.5] * 8}
ROWS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "arcee": ("arcee", COMMON),
    "cohere2": ("cohere2", {**SLIDING, "logit_scale": 0.3}),
    "exaone4": ("exaone4", SLIDING),
    "gemma2 capped": (
        "gemma2",
        {**SLIDING, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "glm4": ("glm4", COMMON),
    "gpt2 scaled by depth": ("gpt2", {**GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "gpt2 upcast": ("gpt2", {**GPT2, "scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
    "gpt2 untied": ("gpt2", {**GPT2, "tie_word_embeddings": False}),
    "granite": (
        "granite",
        {**COMMON, "embedding_multiplier": 3.7, "logits_scaling": 2.0, "residual_multiplier": 0.6},
    ),
    "llama linear": ("llama", rope("linear", factor=2.0)),
    "llama llama3": (
        "llama",
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=CONTEXT // 4,
        ),
    ),
    "llama yarn": ("llama", rope("yarn", factor=4.0, original_max_position_embeddings=CONTEXT // 4)),
    "ministral": ("ministral", SLIDING),
    "olmo2": ("olmo2", COMMON),
    "olmo3": ("olmo3", SLIDING),
    "phi3": ("phi3", {**COMMON, "sliding_window": WINDOW}),
    "phi3 longrope": (
        "phi3",
        {
            **COMMON,
            "original_max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **LONG},
        },
    ),
    "qwen2 windows": (
        "qwen2",
        {**COMMON, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 3},
    ),
    "qwen3 windows": (
        "qwen3",
        {**COMMON, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "seed_oss": ("seed_oss", COMMON),
    "smollm3": (
        "smollm3",
        {**SLIDING, "use_sliding_window": True, "no_rope_layers": [1, 1, 0, 1, 0]},
    ),
    "stablelm": ("stablelm", {**COMMON, "qk_layernorm": True}),
    "stablelm parallel": ("stablelm", {**COMMON, "use_parallel_residual": True}),
    "starcoder2": ("starcoder2", {**COMMON, "sliding_window": WINDOW}),
}


@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_cut_changes_nothing(name: str, tmp_path: Path) -> None:
    folder = make(tmp_path, *ROWS[name])
    same_as_uncut(folder, (1, 3))
    same_as_uncut(folder, (0, 2), private=True)


def test_every_family_of_the_table_is_tried() -> None:
    tried = {kind for kind, _ in [*ROWS.values(), *TINY.values()]}
    generating = [family for family in FAMILIES if family.task == "causal"]
    assert {kind for family in generating for kind in family.model_types} == tried


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gemma3", "qwen3"])
def test_bfloat16_too(family: str, tiny: Callable[[str], Path]) -> None:
    same_as_uncut(tiny(family), (1, 3), dtype="bfloat16")


def test_granite_scales_its_embedding_once(tmp_path: Path) -> None:
    """The base multiplies whatever enters it: a stage without the embedding must not do so again."""
    files = ModelFiles(make(tmp_path, *ROWS["granite"]))
    stages = build_stages(files, make_cut(5, (2, 4)).segments)
    assert [s.part.module.model.embedding_multiplier for s in stages] == [3.7, 1.0, 1.0]


def test_gemma_scales_its_embedding_in_the_type_of_the_weight(tmp_path: Path) -> None:
    """The square root of 3072 is 55.4256; in bfloat16 it is 55.5, and Gemma was trained with that."""
    options = {**COMMON, "hidden_size": 3072, "intermediate_size": 8, "num_hidden_layers": 1, "sliding_window": WINDOW}
    folder = make(tmp_path, "gemma2", options, torch.bfloat16)
    files = ModelFiles(folder)
    assert files.dtype == torch.bfloat16
    (stage,) = build_stages(files, make_cut(1, (0,), private=True).segments[:1])
    ids = torch.tensor([[5, 6]])
    stage.open(1)
    out = stage.forward(1, ids, 0)
    assert out is not None
    assert torch.equal(out, files.index.read("model.embed_tokens.weight")[ids] * 55.5)
    assert not torch.equal(out, (files.index.read("model.embed_tokens.weight")[ids].float() * 3072**0.5).bfloat16())


def test_gpt2_as_published_has_no_prefix_and_old_mask_buffers(tmp_path: Path) -> None:
    folder = make(tmp_path, "gpt2", GPT2)

    def published(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made = {key.removeprefix("transformer."): value for key, value in tensors.items() if key != "lm_head.weight"}
        for i in range(5):
            made[f"h.{i}.attn.bias"] = torch.ones(1, 1, CONTEXT, CONTEXT).tril()
            made[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
        return made

    edit_tensors(folder, published)
    same_as_uncut(folder, (1, 3))
    files = ModelFiles(folder)
    files.load(make_cut(5, (1, 3)).segments)
    assert not [key for key in files.index.reads if key.endswith((".attn.bias", "masked_bias"))]
    assert files.head_cost == pytest.approx(ModelShape(folder).head_cost, rel=1e-3) and files.head_cost > 0


def test_gpt2_hands_on_hidden_states_to_the_last_bit(tmp_path: Path) -> None:
    """Learned positions are added once; what a later stage adds in their place changes no bit, not even of a −0."""
    files = ModelFiles(make(tmp_path, "gpt2", GPT2))
    _, tail = build_stages(files, make_cut(5, (2,)).segments)
    x = torch.tensor([-0.0, 0.0, 1.5])
    assert torch.equal((x + tail.part.module.transformer.wpe(x)).signbit(), x.signbit())


def test_a_type_that_nobody_knows_is_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    folder = edit_config(make(tmp_path, "llama", COMMON), model_type="mamba")
    with pytest.raises(UnknownFamilyError, match=r"config\.json: The model type 'mamba'.*llama.*--model-family"):
        ModelFiles(folder)
    with pytest.raises(UnknownFamilyError, match="no model family 'nonsense'"):
        ModelFiles(folder, family="nonsense")
    assert find_family("mamba", "llama").name == "llama"


def test_a_type_with_a_family_of_its_own_is_taken_for_no_other(tmp_path: Path) -> None:
    """Granite scales what enters it; as a llama every stage would do so again."""
    folder = make(tmp_path, *ROWS["granite"])
    with pytest.raises(
        UnknownFamilyError, match=r"type 'granite' was to be taken for one of the llama.*granite, which"
    ):
        ModelFiles(folder, family="llama")
    assert ModelFiles(folder, family="granite").family.name == "granite"


@pytest.mark.parametrize("loader", ["shard", "hf"])
def test_a_type_that_scales_what_enters_it_is_no_llama(
    loader: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table is taken away: granite is then a type that nobody knows."""
    folder = make(tmp_path, *ROWS["granite"])
    unknown = tuple(family for family in FAMILIES if family.name != "granite")
    monkeypatch.setattr(family_module, "FAMILIES", unknown)
    with pytest.raises(UnknownFamilyError, match="GraniteModel changes what it is given before its blocks"):
        ModelFiles(folder, family="llama").load(make_cut(5, (2,)).segments, loader=loader)
    ModelFiles(folder, family="llama").load(make_cut(5, ()).segments, loader=loader)  # nothing is handed over


@pytest.mark.parametrize(
    ("row", "flag", "value"),
    [("gemma3", "use_bidirectional_attention", True), ("llama", "is_causal", False), ("mistral", "is_causal", None)],
)
def test_a_model_whose_tokens_see_later_ones_is_refused(row: str, flag: str, value: object, tmp_path: Path) -> None:
    folder = edit_config(make(tmp_path, *TINY[row]), **{flag: value})
    with pytest.raises(UnknownFamilyError, match=rf"config\.json: {flag} is {value}: its tokens see those"):
        ModelFiles(folder)


def test_a_boolean_buffer_that_no_file_stores_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.register_buffer("bias", torch.ones(2, dtype=torch.bool, device="meta"), persistent=False)
    with pytest.raises(CheckpointError, match=r"buffer \.bias could not be computed"):
        compute_buffers(model, str(tmp_path))


@pytest.mark.parametrize("family", ["", "gemma3", "llama"])
def test_a_multimodal_gemma_is_refused_in_words(family: str, tmp_path: Path) -> None:
    folder = make(tmp_path, *TINY["gemma3"])
    edit_config(folder, model_type="gemma3", text_config={"model_type": "gemma3_text"}, vision_config={})
    with pytest.raises(UnknownFamilyError, match=r"in no family|takes more than text"):
        ModelFiles(folder, family=family)


def test_embeddings_per_layer_are_refused_even_when_a_family_is_forced(tmp_path: Path) -> None:
    """Gemma 3n's blocks need more than what one stage hands to the next."""
    options = {
        **{k: v for k, v in COMMON.items() if k != "rope_parameters"},
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 128,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0] * 5,
        "intermediate_size": [96] * 5,
        "layer_types": ["full_attention"] * 5,
    }
    folder = make(tmp_path, "gemma3n_text", options)
    with pytest.raises(UnknownFamilyError, match="gemma3n_text"):
        ModelFiles(folder)
    for family in ("gemma3", "llama"):
        with pytest.raises(ModelError):
            ModelFiles(folder, family=family).load(make_cut(5, (2,)).segments[:1])
        with pytest.raises(ModelError):
            ModelFiles(folder, family=family).load(make_cut(5, (2,)).segments[1:])


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_are_refused(kind: str, tmp_path: Path) -> None:
    """Their files name tensors otherwise than their modules do."""
    folder = make(tmp_path, kind, {**COMMON, "num_experts": 4, "moe_intermediate_size": 16, "num_local_experts": 4})
    with pytest.raises(UnknownFamilyError):
        ModelFiles(folder)
    with pytest.raises(CheckpointError, match="experts"):
        ModelFiles(folder, family="llama").load(make_cut(5, (2,)).segments)


def test_rotary_frequencies_that_depend_on_other_texts_are_refused(tmp_path: Path) -> None:
    folder = make(tmp_path, "llama", rope("dynamic", factor=4.0))
    with pytest.raises(UnknownFamilyError, match="rope_type is 'dynamic'"):
        ModelFiles(folder)


def test_longrope_of_one_session_does_not_touch_another(tmp_path: Path) -> None:
    """Its factors change at 64 tokens; the session that is short keeps the short ones."""
    files = ModelFiles(make(tmp_path, *ROWS["phi3 longrope"]))
    stages = build_stages(files, make_cut(5, (2,)).segments)
    alone = chain(stages, PROMPT[:5], [7, 8], 16)
    chain(stages, [*PROMPT, *PROMPT], [7], 128)
    again = chain(stages, PROMPT[:5], [7, 8], 16)
    assert all(torch.equal(a, b) for a, b in zip(alone, again, strict=True))


def test_a_longrope_text_ends_where_its_frequencies_would_change(tmp_path: Path) -> None:
    """Beyond, a text fed in chunks would have keys of both kinds, and logits that no uncut prefill gives."""
    folder = make(tmp_path, *ROWS["phi3 longrope"])
    assert (ModelFiles(folder).context, ModelShape(folder).context) == (64, 64)
    stages = build_stages(ModelFiles(folder), make_cut(5, (2,)).segments)
    apart = {}
    for length in (64, 65):
        prompt = [3 + i % 100 for i in range(length)]
        whole, chunked = (chain(stages, prompt, [], chunk)[0] for chunk in (128, 16))
        apart[length] = float((whole - chunked).abs().max())
    assert apart[64] < 1e-4 < 1e-2 < apart[65]
    assert ModelFiles(make(tmp_path / "plain", "llama", rope("yarn", factor=4.0))).context == CONTEXT


def test_cross_attention_is_refused(tmp_path: Path) -> None:
    folder = edit_config(make(tmp_path, "gpt2", GPT2), add_cross_attention=True)
    with pytest.raises(UnknownFamilyError, match="add_cross_attention"):
        ModelFiles(folder)


def test_chunked_attention_is_refused(tmp_path: Path) -> None:
    folder = edit_config(make(tmp_path, *TINY["gemma2"]), layer_types=["chunked_attention"] * 5, attention_chunk_size=8)
    with pytest.raises(UnknownFamilyError, match=r"layer_types has \['chunked_attention'\]"):
        ModelFiles(folder)
