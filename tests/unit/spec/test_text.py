"""Run files, recipes and overrides: precedence, origins, errors with lines, versions."""

from pathlib import Path

import pytest
from tests.support.golden_files import assert_golden
from tests.support.run_files import DENSE, VALID

from meshwright import __version__
from meshwright.errors import SpecError, SpecErrors
from meshwright.spec import RunSpec
from meshwright.spec.families import FAMILIES
from meshwright.spec.renamed import RENAMED_KEYS
from meshwright.spec.text import (
    dump_run,
    find_run_file,
    load_run,
    parse_override,
    parse_run,
    read_run,
    recipe_names,
    require_version,
)
from meshwright.spec.violations import all_keys

NAMELESS = DENSE.replace("name: tiny\n", "")
REST = "schedule: {num_steps: 10}\ndata: {synthetic: {}, sequence_length: 128, batch_sequences: 8}\n"


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text)
    return file


def violations(text: str, overrides: list[str] | None = None) -> list[SpecError]:
    try:
        parse_run(text, overrides or []).require_valid()
    except SpecErrors as error:
        return error.violations
    except SpecError as error:
        return [error]
    return []


class TestPrecedence:
    def test_command_line_over_file_over_recipe_over_default(self, tmp_path: Path):
        write(tmp_path, "base.yaml", DENSE + "seed: 1\noptim: {lr: 1e-3, beta1: 0.8, eps: 1e-6}\n")
        file = write(tmp_path, "run.yaml", "recipe: base.yaml\nseed: 2\noptim:\n  lr: 2e-3\n")
        loaded = read_run(file, ["seed=3"])
        assert (loaded.run.seed, loaded.run.optim.lr, loaded.run.optim.beta1) == (3, 2e-3, 0.8)
        origins = {key: str(origin) for key, origin in loaded.origins().items()}
        assert origins["seed"] == "command line"
        assert origins["optim.lr"] == f"file {file}:4"
        assert origins["optim.beta1"] == f"recipe {tmp_path / 'base.yaml'}:17"
        assert origins["optim.beta2"] == "default"

    def test_recipe_by_name_and_on_the_command_line(self, tmp_path: Path):
        file = write(tmp_path, "run.yaml", "seed: 5\n")
        run = load_run(file, ["recipe=demo"])
        assert (run.name, run.seed) == ("demo", 5)
        assert load_run("demo").name == "demo"
        assert str(read_run("demo").origins()["name"]).startswith("recipe ")

    def test_a_recipe_may_lie_over_a_recipe(self, tmp_path: Path):
        write(tmp_path, "a.yaml", DENSE)
        write(tmp_path, "b.yaml", "recipe: a.yaml\nseed: 1\n")
        assert load_run(write(tmp_path, "c.yaml", "recipe: b.yaml\n")).seed == 1

    def test_a_recipe_that_names_itself_is_refused(self, tmp_path: Path):
        file = write(tmp_path, "a.yaml", "recipe: a.yaml\n")
        with pytest.raises(SpecError, match="more than 8 recipes"):
            load_run(file)

    def test_the_last_override_wins(self):
        assert parse_run(DENSE, ["seed=1", "seed=2"]).run.seed == 2

    def test_an_override_reaches_below_an_absent_value(self):
        run = parse_run(DENSE, ["observe.evaluate.every_steps=5", "data.holdout_sequences=2"]).require_valid()
        assert run.observe.evaluate is not None

    def test_null_takes_a_value_away(self):
        assert parse_run(DENSE, ["optim.max_grad_norm=null"]).run.optim.max_grad_norm is None


class TestModel:
    def test_a_family_by_name(self):
        loaded = parse_run("model: llama-3.2-1b\n" + REST)
        assert loaded.run.model == FAMILIES["llama-3.2-1b"]
        assert str(loaded.origins()["model.width"]) == "family llama-3.2-1b"

    @pytest.mark.parametrize(
        ("text", "overrides"),
        [
            ("model: llama-3.2-1b\n", ["model.num_layers=4", "model.attention.window=64"]),
            ("model: {family: llama-3.2-1b, num_layers: 4, attention: {window: 64}}\n", []),
            ("model: gpt2-124m\n", ["model=llama-3.2-1b", "model.num_layers=4", "model.attention.window=64"]),
        ],
    )
    def test_fields_laid_over_a_family(self, text: str, overrides: list[str]):
        model = parse_run(text + REST, overrides).run.model
        base = FAMILIES["llama-3.2-1b"]
        assert model == base.with_(num_layers=4, attention=base.attention.with_(window=64))

    def test_naming_a_family_starts_the_model_anew(self, tmp_path: Path):
        write(tmp_path, "base.yaml", "model: {family: gpt2-124m, num_layers: 3}\n" + REST)
        file = write(tmp_path, "run.yaml", "recipe: base.yaml\nmodel: {family: llama-3.2-1b}\n")
        assert load_run(file).model == FAMILIES["llama-3.2-1b"]

    def test_a_name_that_is_no_family_labels_a_complete_model(self):
        assert parse_run(DENSE, ["model.family=mine"]).run.model.family == "mine"

    def test_a_key_that_many_sections_have_is_not_taken_for_one_of_them(self):
        """`preference.kind` was said to be `model.mlp.kind`."""
        (found,) = violations("model: llama-3.2-1b\npreference: {kind: sigmoid}\n" + REST)
        assert found.hint.startswith("the keys here are loss, beta")

    def test_a_slip_in_a_family_is_told(self):
        found = violations("model: {family: lama-3.2-1b, num_layers: 2}\n" + REST)
        assert "did you mean 'llama-3.2-1b'?" in {violation.hint for violation in found}
        found = violations("model: lama-3.2-1b\nseed: -1\n" + REST)
        assert [violation.where for violation in found] == ["run.yaml:1 model", "run.yaml:2 seed"]

    @pytest.mark.parametrize("name", ["hf", "Llama-3.1-8B"])
    def test_a_hugging_face_config_beside_the_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ):
        """Also a folder that has the name of a family, read from the directory that has it."""
        monkeypatch.chdir(tmp_path)
        (tmp_path / name).mkdir()
        config = (
            '{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,'
            '"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "rms_norm_eps": 1e-5,'
            '"max_position_embeddings": 128, "rope_theta": 10000.0, "tie_word_embeddings": false,'
            '"hidden_act": "silu"}'
        )
        write(tmp_path / name, "config.json", config)
        write(tmp_path, "run.yaml", f"model: ./{name}\n" + REST)
        model = load_run(Path("run.yaml"), ["model.num_layers=1"]).model
        assert (model.width, model.num_layers) == (64, 1)


ERRORS = {
    "unknown key": "parallel: {tpp: 2}",
    "key of another section": "tp: 2",
    "dotted key in a file": "parallel.tp: 2",
    "wrong word": "precision: {compute: bf61}",
    "not a number": "optim: {lr: fast}",
    "not a list": "optim: {groups: {pattern: x}}",
    "word for a list": "train_only: norm",
    "not a mapping in a list": "optim: {groups: [x]}",
    "unknown key in a list": "optim: {groups: [{pattern: x, lr: 2}]}",
    "not whole": "seed: 1.5",
    "a unit nobody knows": "seed: 4kg",
    "truth for a number": "parallel: {tp: true}",
    "number for text": "name: 7",
    "a name with a space": "name: my run",
    "too small": "checkpoint: {every_steps: 0}",
    "too large": "parallel: {zero: 4}",
    "beyond 64 bits": "seed: 1e40",
    "not finite": "optim: {lr: .inf}",
    "scalar for a mapping": "parallel: 8",
    "list for a mapping": "parallel: [8]",
    "not true or false": "compile: maybe",
    "unknown version": "version: 99",
    "recipe that is not there": "recipe: dmeo",
    "recipe that is no name": "recipe: 5",
    "key twice": "seed: 1\nseed: 2",
    "merge key": "<<: {seed: 1}",
}


class TestErrors:
    def test_texts(self):
        found = [
            f"# {name}\n{line}\n"
            + "\n".join(str(violation) for violation in violations(f"{NAMELESS}{line}\n"))
            for name, line in ERRORS.items()
        ]
        assert_golden("errors/values.txt", "\n\n".join(found) + "\n")

    @pytest.mark.parametrize("line", ERRORS.values())
    def test_each_is_refused_with_its_line_and_file(self, line: str):
        found = violations(f"{NAMELESS}{line}\n")
        assert len(found) == 1
        assert found[0].where.startswith("run.yaml")

    def test_all_at_once_and_each_in_its_place(self):
        bad = DENSE.replace("width: 64", "width: wide").replace("  num_steps: 100\n", "  steps: 100\n")
        found = violations(bad, ["parallel.tq=2", "nonsense"])
        assert [violation.where for violation in found] == [
            "command line",
            "run.yaml:5 model.width",
            "command line parallel.tq",
            "run.yaml:10 schedule.num_steps",
            "run.yaml:11 schedule.steps",
        ]

    def test_a_broken_rule_names_the_line(self):
        assert violations(DENSE, ["parallel.tp=8"])[0].where == "command line parallel.tp"
        assert violations(DENSE + "parallel:\n  tp: 8\n")[0].where == "run.yaml:17 parallel.tp"

    @pytest.mark.parametrize("override", ["seed", "=1", "a..b=1", ".a=1", "seed=", "seed= ", "seed=[1", ""])
    def test_what_is_no_override(self, override: str):
        with pytest.raises(SpecError) as caught:
            parse_override(override)
        assert caught.value.where.startswith("command line")
        assert caught.value.hint

    @pytest.mark.parametrize(
        ("content", "fact"),
        [
            (b"", "this file is empty"),
            (b"# only a comment\n", "this file is empty"),
            (b"- a\n- b\n", "not a mapping"),
            (b"just words", "not a mapping"),
            (b"name: \xff\xfe", "byte 6 is not UTF-8"),
            (b"#" * (2**20 + 1), "larger than 1 MiB"),
        ],
        ids=["empty", "comment", "list", "text", "latin", "large"],
    )
    def test_files_that_are_no_run(self, tmp_path: Path, content: bytes, fact: str):
        file = tmp_path / "run.yaml"
        file.write_bytes(content)
        with pytest.raises(SpecError, match=fact) as caught:
            load_run(file)
        assert str(file) in caught.value.where

    def test_a_byte_order_mark_is_no_matter(self, tmp_path: Path):
        file = tmp_path / "run.yaml"
        file.write_bytes(b"\xef\xbb\xbf" + DENSE.encode())
        assert load_run(file).name == "tiny"

    def test_a_missing_file_suggests_its_neighbour(self, tmp_path: Path):
        write(tmp_path, "train.yaml", DENSE)
        with pytest.raises(SpecError) as caught:
            load_run(tmp_path / "trai.yaml")
        assert "train.yaml" in caught.value.hint

    @pytest.mark.parametrize("name", ["x" * 5000, "a/" * 3000, "nul\x00l", "", "missing/run.yaml"])
    def test_names_that_no_file_has(self, name: str):
        with pytest.raises(SpecError):
            load_run(name)
        assert violations(f"recipe: {name!r}\nmodel: ./{name!r}\n{REST}")

    def test_a_folder_suggests_its_run_file(self, tmp_path: Path):
        write(tmp_path, "run.yaml", DENSE)
        with pytest.raises(SpecError, match="is a folder") as caught:
            find_run_file(str(tmp_path))
        assert "run.yaml" in caught.value.hint


OLD = """version: 1
model: llama-3.2-1b
parallel: {dp_shard: 2, zero: 2, reduce: last}
precision: {compute: bf16, fp8: {recipe: blocks, bf16_ends: 0}}
schedule: {num_steps: 10, final_ratio: 0.2}
data: {synthetic: {}, sequence_length: 128, batch_sequences: 8, ramp: []}
"""


class TestVersions:
    def test_an_old_file_is_refused_with_the_new_names_of_its_keys(self):
        (violation,) = violations(OLD)
        assert violation.where == "run.yaml version"
        assert violation.fact == f"version is 1, and meshwright {__version__} reads version 2"
        assert violation.hint == (
            "rename its keys (data.ramp is now data.batch_ramp; "
            "parallel.reduce: last is now parallel.grad_reduce: last_microbatch; "
            "precision.fp8.bf16_ends is now precision.fp8.bf16_layers_each_end; "
            "precision.fp8.recipe: blocks is now precision.fp8.recipe: blockwise; "
            "schedule.final_ratio is now schedule.min_lr_ratio) and set version: 2"
        )

    def test_an_old_file_without_renamed_keys(self):
        (violation,) = violations(f"version: 1\nmodel: llama-3.2-1b\n{REST}")
        assert violation.hint == "none of its keys changed: set version: 2"

    def test_an_old_key_in_a_new_file_is_unknown_and_its_new_name_is_the_hint(self):
        found = violations(OLD.replace("version: 1", "version: 2").replace("blocks", "blockwise"))
        assert [violation.hint for violation in found] == [
            "it is called 'parallel.grad_reduce' since version 2",
            "it is called 'precision.fp8.bf16_layers_each_end' since version 2",
            "it is called 'schedule.min_lr_ratio' since version 2",
            "it is called 'data.batch_ramp' since version 2",
        ]

    @pytest.mark.parametrize(
        ("key", "hint"),
        {
            "max_tokens": "data.packing=whole fills each sequence",
            "join": "records files of `meshwright.open_loader` have it",
            "part": "data.holdout: {share: 0.01}",
            "num_workers": "tokens are read ahead by one thread",
            "on_device": "data.on_device_bytes: 2GiB",
        }.items(),
    )
    def test_a_key_of_records_files_says_where_it_lives(self, key: str, hint: str):
        (violation,) = violations(
            f"model: llama-3.2-1b\n{REST.replace('{synthetic', f'{{{key}: 5, synthetic')}"
        )
        assert violation.fact == f"there is no key {key!r} in data" and hint in violation.hint

    def test_every_new_name_is_a_key_and_no_old_one_is(self):
        keys = all_keys(RunSpec)
        assert set(RENAMED_KEYS.values()) <= set(keys)
        assert not set(RENAMED_KEYS) & set(keys)

    @pytest.mark.parametrize("version", [0, 3, "2", None, True, 1.5])
    def test_unknown_versions_are_refused(self, version: object):
        with pytest.raises(SpecError, match="which is not known"):
            require_version({"version": version}, "run.yaml")


@pytest.mark.parametrize("name", VALID)
def test_a_dump_loads_back_equal(name: str):
    run = parse_run(VALID[name]).run
    assert parse_run(dump_run(run)).run == run


@pytest.mark.parametrize("name", FAMILIES)
def test_a_dump_of_every_family_loads_back_equal(name: str):
    run = parse_run(f"model: {name}\n{REST}").run
    assert parse_run(dump_run(run)).run == run


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_valid_and_named_as_its_file(name: str):
    assert load_run(name).name == name


def test_a_model_in_the_place_of_a_missing_folder_is_taken():
    """A run file may come from another machine."""
    assert [each.fact for each in violations("model: ./gone\n" + REST)] == ["there is no folder './gone'"]
    overrides = ["model=./gone-too", "model=gpt2-124m"]
    assert parse_run("model: ./gone\n" + REST, overrides).require_valid().model.family == "gpt2-124m"
