"""Contenders in processes of their own: the protocol, a peer that dies, one that doesn't answer, one that can't be
installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from harness.tiny_directory import write_tiny_directory
from unison.workers.bench import comparison, contenders, environments
from unison.workers.bench.comparison import Setting, record, step_bytes
from unison.workers.bench.contenders import Contender, Entry
from unison.workers.bench.environments import PeerUnavailableError, Recipe, fingerprint, peer_python
from unison.workers.bench.peers import protocol
from unison.workers.bench.workloads import Workload, decode, with_first_token

DRIVER = """
import os, sys
from peers.protocol import Loaded, speak

def load(request):
    print("libraries print what they like", flush=True)
    if request.options.get("is_refusing"):
        raise ValueError("no such model")
    def run(work):
        if work.max_tokens == 13:
            print("out of luck", file=sys.stderr, flush=True)
            os._exit(3)
        if work.max_tokens == 14:
            sys.stdin.read()
        return 0.5, len(work.prompts) * work.n * work.max_tokens
    return Loaded(run, (), "all", f"{request.threads} threads, {request.dtype}")

sys.exit(speak(load))
"""
BENCH = Path(contenders.__file__).parent


def entry(name: str = "fake", **options: object) -> Entry:
    program = f"import sys; sys.path.append({str(BENCH)!r})\n{DRIVER}"
    return Entry(name, (sys.executable, "-I", "-c", program), options=options)


def work(max_tokens: int) -> Workload:
    return Workload(f"work {max_tokens}", ((5, 6, 7), (5, 6)), 2, max_tokens, 1.0, False)


def started(tmp_path: Path, **options: object) -> Contender:
    contender = Contender(entry(**options))
    contender.start(tmp_path, "bfloat16", 2)
    return contender


def test_a_contender_loads_and_runs(tmp_path: Path) -> None:
    contender = started(tmp_path)
    try:
        assert contender.description["notes"] == "2 threads, bfloat16"
        assert contender.description["versions"] == {"python": sys.version.split()[0]}
        measured = contender.run(work(8))
        assert (measured.seconds, measured.num_tokens, measured.tokens_per_s) == (0.5, 32, 64.0)
        assert measured.peak_rss_bytes > 1e6 or sys.platform != "linux"
    finally:
        contender.close()
    contender.close()


def test_a_death_says_how_and_what_was_said_last(tmp_path: Path) -> None:
    contender = started(tmp_path)
    try:
        with pytest.raises(PeerUnavailableError, match=r"fake ended with 3: .*out of luck"):
            contender.run(work(13))
    finally:
        contender.close()


def test_an_error_in_the_driver_is_answered(tmp_path: Path) -> None:
    contender = Contender(entry(is_refusing=True))
    try:
        with pytest.raises(PeerUnavailableError, match="fake: ValueError: no such model"):
            contender.start(tmp_path, "bfloat16", 2)
    finally:
        contender.close()


def test_silence_ends_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contender = started(tmp_path)
    monkeypatch.setattr(contenders, "RUN_DEADLINE_S", 0.2)
    try:
        with pytest.raises(PeerUnavailableError, match="no answer"):
            contender.run(work(14))
    finally:
        contender.close()


def test_what_is_missing_doesnt_start(tmp_path: Path) -> None:
    contender = Contender(Entry("absent", (str(tmp_path / "python"),)))
    with pytest.raises(PeerUnavailableError, match="absent doesn't start"):
        contender.start(tmp_path, "bfloat16", 2)
    contender.close()


def test_variables_of_ours_stay_with_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer isn't slowed down by what this package needs in its environment."""
    monkeypatch.setenv("MKL_CBWR", "AVX2,STRICT")
    program = (
        "import json, os, sys; sys.stdin.readline(); "
        "print(json.dumps({'ready': {'seen': os.environ.get('MKL_CBWR'), 'threads': os.environ['OMP_NUM_THREADS']}}))"
    )
    for is_ours, seen in ((True, "AVX2,STRICT"), (False, None)):
        contender = Contender(Entry("fake", (sys.executable, "-c", program), is_ours))
        contender.start(tmp_path, "bfloat16", 3)
        contender.close()
        assert contender.description == {"seen": seen, "threads": "3"}


@pytest.mark.slow
def test_a_peer_that_cant_be_installed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISON_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(PeerUnavailableError, match=r"nowhere can't be installed: .*no-such-package"):
        peer_python(Recipe("nowhere", "nowhere", ("no-such-package==1",)))
    assert not (tmp_path / "peers" / "nowhere" / "installed").exists()


def test_an_installed_peer_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISON_CACHE", str(tmp_path))
    recipe = Recipe("here", "here", ("some-package==1",))
    (tmp_path / "peers" / "here").mkdir(parents=True)
    (tmp_path / "peers" / "here" / "installed").write_text(fingerprint(recipe))
    monkeypatch.setattr(environments.subprocess, "run", None)  # nothing is installed
    assert peer_python(recipe) == tmp_path / "peers" / "here" / "bin" / "python"
    assert fingerprint(recipe) != fingerprint(Recipe("here", "here", ("some-package==2",)))


def test_every_peer_is_pinned_and_has_a_driver() -> None:
    for recipe in environments.RECIPES.values():
        assert (BENCH / "peers" / f"{recipe.driver}.py").is_file()
        assert all("==" in requirement for requirement in recipe.requirements)


def test_the_comparison_goes_on_without_a_peer_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One peer can't be had, one dies during a workload: both are left out with the reason, the rest is measured."""

    def find(name: str) -> Entry:
        if name == "nowhere":
            raise PeerUnavailableError("nowhere can't be installed: no such package")
        return entry(name) if name == "dies" else immortal(name)

    monkeypatch.setattr(comparison, "peer_entry", find)
    monkeypatch.setattr(comparison, "step_bytes", lambda *_: 1000)
    ours = [immortal("ours")]
    setting = Setting(tmp_path, "bfloat16", 1, 2)
    found = record(setting, ours, ["nowhere", "dies", "stays"], [work(8), work(13)], {})
    assert found["left_out"].keys() == {"nowhere", "dies"} and "out of luck" in found["left_out"]["dies"]
    assert {name: len(runs) for name, runs in found["workloads"]["work 8"].items()} == {
        "ours": 2, "dies": 2, "stays": 2,
    }  # fmt: skip
    assert found["workloads"]["work 13"].keys() == {"ours", "stays"}
    with pytest.raises(PeerUnavailableError, match="ours ended with 3"):
        record(setting, [entry("ours")], [], [work(13)], {})


def immortal(name: str) -> Entry:
    """A fake without the workload at which the others die."""
    fake = entry(name)
    return Entry(name, (*fake.command[:-1], fake.command[-1].replace("max_tokens == 13", "max_tokens == -1")))


def test_stop_tokens_and_counting(tmp_path: Path) -> None:
    assert protocol.stop_tokens(str(tmp_path)) == set()
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    assert protocol.stop_tokens(str(tmp_path)) == {2}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert protocol.stop_tokens(str(tmp_path)) == {0, 2}
    ragged = protocol.Work([[1]], 2, 4, 1.0, False)
    assert protocol.count_tokens([[5, 2, 0, 0], [5, 5, 5, 5]], {2}, ragged) == 6


def test_a_rounds_prompts_differ_in_their_first_token_alone() -> None:
    before = decode(2, 5, 4, 1000)
    after = with_first_token(before, 77)
    assert [prompt[0] for prompt in after.prompts] == [77, 77]
    assert [prompt[1:] for prompt in after.prompts] == [prompt[1:] for prompt in before.prompts]


def test_step_bytes(tmp_path: Path) -> None:
    """Weights once, and the KV of each sequence."""
    write_tiny_directory(tmp_path)
    setting = Setting(tmp_path, "bfloat16", 1, 1)
    one, two = (step_bytes(setting, decode(batch, 8, 4, 1000)) for batch in (1, 2))
    assert two - one == step_bytes(setting, decode(3, 8, 4, 1000)) - two > 0
    assert one > two - one
