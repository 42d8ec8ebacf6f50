"""Mutated command lines and run files: every one ends with a known exit code and a text, none with a fault.

200 in CI and 2,000 in soak, each drawn from its number alone. Everything runs in this process; ranks are not
started, and a command that takes long is interrupted, which is exit code 130. Left out are the verbs that
measure or trace for seconds: `bench`, `demo`, `rehearse` and `hardware probe`.
"""

import copy
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.malformed import TOKENS, malformed
from tests.support.run_files import TRAINABLE, train_run_file

from meshwright.cli.main import run
from meshwright.launch.attempt import AttemptEnd

KNOWN_CODES = {0, 2, 3, 4, 130}
SECONDS = 5
NUM_IN_CI, NUM_IN_SOAK = 200, 2000
CHUNK = 100

# Words of valid commands, in a folder with: run.yaml, run (trained), packed (dataset), hf, text.txt.
COMMANDS = [
    "train run.yaml --dir fresh --stop-after 1 --quiet",
    "train run.yaml optim.lr=0.5 schedule.num_steps=3 --dir run -q",
    "evaluate run --data packed --ranks 1 --json",
    "evaluate hf device=cpu data.sequence_length=16 --data packed",
    "sample run --prompt It --tokens 3 --temperature 0.5 --top-k 4 --seed 1",
    "sample hf --prompt It --tokens 2 --temperature 0 --tokenizer bytes --json",
    "convert run out --to huggingface --dtype bf16 --ema --checkpoint 2",
    "convert hf out.pt",
    "compare run run --steps 2 --rtol 0.1 --assert-equal --json",
    "report run -o report.html --json",
    "check run.yaml parallel.tp=2 --origins",
    "check run.yaml --on h100:1 --json",
    "plan llama-3.2-1b --on h100:8x1 --seq 2048 --batch-tokens 1M --tokens 1B tp=2 --top 2 -o plan.yaml",
    "plan gpt2-124m --on a100:2 --deadline 30d --objective speed --precision bf16 --json",
    "predict run.yaml --on h100:1 --json",
    "show memory run.yaml --on h100:1",
    "show schedule run.yaml parallel.pp=2",
    "show mesh run.yaml parallel.dp_shard=2",
    "data pack text.txt -o again --tokenizer bytes --split blank-line -q",
    "data inspect packed --documents 1 --json",
    "data stats packed",
    "data verify packed",
    "models list --json",
    "hardware list",
    "env --json",
    "schema",
    "completion bash",
]
RUN_FILE_COMMANDS = [
    "check bad.yaml",
    "check bad.yaml --json",
    "predict bad.yaml --on h100:1",
    "show memory bad.yaml --on h100:1",
    "train bad.yaml --dir fresh --stop-after 1 -q",
    "train bad.yaml --dir run -q",
]
WORDS = [*TOKENS, "", "x" * 300]
WORDS += """
. run packed hf text.txt run.yaml nowhere --help --json --dir -o --on --step optim.lr=-1
model.width=3 parallel.tp=7 -q packed/tokens.bin run/metrics.jsonl hf/model.safetensors
data.path=text.txt = a=b=c schedule.num_steps=80GiB model=hf model=nowhere --checkpoint -- é
""".split()  # noqa: SIM905  (a list literal takes a line for each)


VALUES = """
0 1 2 3 4 8 7 16 -1 0.5 1e-3 1e9 4K 80GiB true false null cpu cuda auto bytes bf16 fp16 fp32 fp64
none full selective sgd muon lamb adafactor adamw_8bit wsd linear constant joined learned layer gelu
[] {} a100:4 h100:1 packed hf run nowhere '{}'
""".split()  # noqa: SIM905  (a list literal takes a line for each)
KEYS = """
model.num_layers model.width model.vocab_size model.attention.num_heads model.norm
model.attention.num_kv_heads model.attention.head_width model.attention.window model.moe
model.mlp.kind model.mlp.width model.positions model.rope model.tied_head model.dropout parallel.tp
parallel.zero parallel.dp_shard parallel.pp precision.compute precision.fp8 precision.weights
precision.loss_scale memory.recompute memory.offload optim.kind optim.lr optim.beta1 optim.ema_decay
optim.state optim.max_grad_norm schedule.kind schedule.num_steps schedule.warmup_steps
schedule.decay_steps data.path data.synthetic data.sequence_length data.batch_sequences
data.microbatch_sequences data.documents data.max_epochs data.holdout_sequences data.shuffle
checkpoint.every_steps checkpoint.keep_last checkpoint.start_from observe.evaluate
observe.every_steps seed deterministic device name
""".split()  # noqa: SIM905  (a list literal takes a line for each)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the commands name."""
    made = tmp_path_factory.mktemp("fuzz")
    train_run_file(made, "schedule.num_steps=2", "--quiet")
    (made / "text.txt").write_text("the fox and the crow\n" * 60)
    assert run(["data", "pack", str(made / "text.txt"), "-o", str(made / "packed")]) == 0
    assert run(["convert", str(made / "run"), str(made / "hf")]) == 0
    return made


Change = Callable[[random.Random, list[str], int], None]


def mutated_words(source: random.Random) -> list[str]:
    """A valid command with one to three changes, most of them after the verb."""
    words = source.choice(COMMANDS).split()
    for _ in range(source.choice((1, 1, 1, 2, 3))):
        place = source.randrange(1 if len(words) > 1 and source.random() < 0.9 else 0, len(words))
        source.choice(CHANGES)(source, words, place)
    return words if words and all(map(is_harmless, words)) else mutated_words(source)


def _replace_value(source: random.Random, words: list[str], place: int) -> None:
    key, is_setting, _ = words[place].partition("=")
    if is_setting:
        words[place] = f"{source.choice((key, source.choice(KEYS)))}={source.choice(VALUES)}"
    elif place and words[place - 1].startswith("-"):
        words[place] = source.choice(VALUES)
    else:
        words.append(f"{source.choice(KEYS)}={source.choice(VALUES)}")


def _delete(source: random.Random, words: list[str], place: int) -> None:
    if len(words) > 1:
        del words[place]


def _insert(source: random.Random, words: list[str], place: int) -> None:
    words.insert(place + 1, source.choice((*WORDS, *words)))


def _replace(source: random.Random, words: list[str], place: int) -> None:
    words[place] = source.choice(WORDS)


def _garble(source: random.Random, words: list[str], place: int) -> None:
    words[place] = malformed(words[place] + "\n", source.randrange(2**30)).strip("\n")


def _swap(source: random.Random, words: list[str], place: int) -> None:
    other = source.randrange(len(words))
    words[place], words[other] = words[other], words[place]


def _repeat_option(source: random.Random, words: list[str], place: int) -> None:
    """An option that is given twice: the last one counts."""
    options = [one for one, word in enumerate(words) if word.startswith("--")]
    if options:
        place = source.choice(options)
        has_value = place + 1 < len(words) and not words[place + 1].startswith("-")
        words += words[place : place + 1 + has_value]


CHANGES: list[Change] = [
    _replace_value,
    _replace_value,
    _delete,
    _insert,
    _replace,
    _garble,
    _swap,
    _repeat_option,
]


def is_harmless(word: str) -> bool:
    """Whether a word, as a path, stays in the folder, and as a verb runs in this process within seconds."""
    slow = ("bench", "demo", "rehearse", "probe", "--measure")
    return not word.startswith(("/", "~")) and "=/" not in word and ".." not in word and word not in slow


def mutated_file(source: random.Random) -> str:
    """The text of a run file with typing errors, or with other values at some of its keys."""
    if source.random() < 0.5:
        return malformed(yaml.safe_dump(TRAINABLE, sort_keys=False), source.randrange(2**30))
    tree = copy.deepcopy(TRAINABLE)
    for key in source.sample(KEYS, source.choice((1, 1, 2))):
        inner: Any = tree
        *path, last = key.split(".")
        for part in path:
            if not isinstance(inner.get(part), dict):
                inner[part] = {}
            inner = inner[part]
        inner[last] = yaml.safe_load(source.choice(VALUES))
    return yaml.safe_dump(tree)


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Raise KeyboardInterrupt in the body after some seconds, as Ctrl-C would."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attempt(number: int, here: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """Run the command of this number; returns its exit code."""
    source = random.Random(number)
    words = mutated_words(source)
    if number % 5 >= 3:
        (here / "bad.yaml").write_bytes(mutated_file(source).encode("utf-8", "surrogatepass"))
        words = source.choice(RUN_FILE_COMMANDS).split()
    capsys.readouterr()
    with interrupted_after(SECONDS):
        code = run(words)
    captured = capsys.readouterr()
    said = captured.err + captured.out
    context = f"number {number}: {words!r} ended with {code}\n{said}"
    assert code in KNOWN_CODES, context
    assert "Traceback" not in said and "fault of ours" not in said, context
    assert (
        code in (0, 130) or "error: " in said or any(one in said for one in ('"valid": false', "Usage: "))
    ), context
    return code, words


def fuzz(numbers: range, folder: Path, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codes: list[int] = []
    for number in numbers:
        if number % 20 == 0:  # what earlier commands wrote must not hide what later ones would
            clear(work)
            shutil.copytree(folder, work, dirs_exist_ok=True)
        codes.append(attempt(number, work, capsys)[0])
    # A fuzz that always or never gets through tests nothing.
    assert codes.count(2) > len(codes) // 3 and codes.count(0) > len(codes) // 50


def clear(work: Path) -> None:
    for path in work.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of the commands; no rank is started as a process."""
    here = tmp_path / "work"
    here.mkdir()
    monkeypatch.chdir(here)
    for module in ("meshwright.train.supervise", "meshwright.launch.local"):
        monkeypatch.setattr(f"{module}.run_attempt", lambda *_, **__: AttemptEnd("done", 0))
    return here


@pytest.mark.parametrize("first", range(0, NUM_IN_CI, CHUNK))
def test_mutated_commands(first: int, folder: Path, work: Path, capsys: pytest.CaptureFixture[str]):
    fuzz(range(first, first + CHUNK), folder, work, capsys)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(NUM_IN_CI, NUM_IN_CI + NUM_IN_SOAK, CHUNK))
def test_many_mutated_commands(first: int, folder: Path, work: Path, capsys: pytest.CaptureFixture[str]):
    fuzz(range(first, first + CHUNK), folder, work, capsys)
