"""Families are numbers, so the numbers are checked: against published counts and printed sizes."""

from pathlib import Path

import pytest

from meshwright.errors import SpecError
from meshwright.spec.families import FAMILIES, family
from meshwright.spec.hub_ids import HUB_IDS, hub_id_of
from meshwright.spec.huggingface import load_model
from meshwright.spec.parameters import num_active_parameters, num_parameters
from meshwright.spec.text import parse_run

# Elements in the published checkpoints (main model; DeepSeek-V3 without its prediction module,
# its scales and its router biases).
PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352,
}
# As printed in the table of the Megatron paper, in billions, with its number of digits.
MEGATRON = {
    "megatron-1.7b": "1.7",
    "megatron-3.6b": "3.6",
    "megatron-7.5b": "7.5",
    "megatron-18b": "18.4",
    "megatron-39b": "39.1",
    "megatron-76b": "76.1",
    "megatron-145b": "145.6",
    "megatron-310b": "310.1",
    "megatron-530b": "529.6",
    "megatron-1t": "1008.0",
}
GPT3 = {"gpt3-125m": 0.125, "gpt3-760m": 0.760, "gpt3-1.3b": 1.3, "gpt3-2.7b": 2.7, "gpt3-6.7b": 6.7}


@pytest.mark.parametrize("name", PUBLISHED)
def test_count_equals_the_published_one(name: str) -> None:
    assert num_parameters(family(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron_sizes_to_the_printed_digits(name: str) -> None:
    assert f"{num_parameters(family(name)) / 1e9:.1f}" == MEGATRON[name]


@pytest.mark.parametrize("name", GPT3)
def test_gpt3_sizes_to_their_names(name: str) -> None:
    digits = len(f"{GPT3[name]:g}".split(".")[1])
    assert round(num_parameters(family(name)) / 1e9, digits) == GPT3[name]


def test_gpt3_175b() -> None:
    assert round(num_parameters(family("gpt3-175b")) / 1e9) == 175


@pytest.mark.parametrize(
    ("name", "billions"), [("mixtral-8x7b", 12.9), ("qwen3-30b-a3b", 3.4), ("deepseek-v3", 37.6)]
)
def test_active_parameters(name: str, billions: float) -> None:
    """What the authors say is active, embedding counted."""
    assert round(num_active_parameters(family(name)) / 1e9, 1) == billions


def test_every_family_is_listed_under_its_own_name_and_is_consistent() -> None:
    for name, model in FAMILIES.items():
        assert model.family == name
        assert (model.rope is not None) == (model.positions == "rope")
        assert model.attention.num_heads % model.attention.num_kv_heads == 0


def test_names_ignore_case() -> None:
    assert family("Llama-3.1-8B") is FAMILIES["llama-3.1-8b"]


def test_an_unknown_family_suggests_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"no model family is called 'lama-3\.1-8b'") as caught:
        family("lama-3.1-8b")
    assert "llama-3.1-8b" in caught.value.hint


def test_a_hopeless_name_points_to_the_list() -> None:
    with pytest.raises(SpecError) as caught:
        family("zzzzzz")
    assert "models list" in caught.value.hint


@pytest.mark.parametrize(
    ("hub_id", "name"),
    [
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("QWEN/qwen3-30b-a3b", "qwen3-30b-a3b"),
        ("openai-community/gpt2-xl", "gpt2-1.5b"),
        ("hf://deepseek-ai/DeepSeek-V3-Base", "deepseek-v3"),
        ("https://huggingface.co/mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
    ],
)
def test_a_hub_id_names_its_family(hub_id: str, name: str) -> None:
    assert family(hub_id) is load_model(hub_id) is FAMILIES[name]


def test_every_hub_id_names_a_family() -> None:
    assert set(HUB_IDS.values()) <= set(FAMILIES)
    assert all(hub_id_of(each) == each for each in HUB_IDS)


def test_a_run_file_may_name_its_model_by_hub_id() -> None:
    rest = "data: {synthetic: {}, sequence_length: 8, batch_sequences: 1}\nschedule: {num_steps: 1}\n"
    for model in ("Qwen/Qwen3-0.6B", "{family: Qwen/Qwen3-0.6B, num_layers: 2}"):
        run = parse_run(f"model: {model}\n{rest}").run
        assert (run.model.family, run.model.width) == ("qwen3-0.6b", 1024)


def test_a_folder_is_preferred_over_the_hub_id_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("Qwen/Qwen3-0.6B").mkdir(parents=True)
    with pytest.raises(SpecError, match="cannot read the file"):
        load_model("Qwen/Qwen3-0.6B")


def test_an_unknown_hub_id_suggests_the_nearest_and_the_config() -> None:
    with pytest.raises(SpecError, match="neither a folder here nor the hub id of a known family") as caught:
        load_model("meta-llama/Llama-3.1-9B")
    assert "meta-llama/Llama-3.1-8B" in caught.value.hint
    assert "config.json" in caught.value.hint
