"""No key in any file, log or text; the checkpoint of a run only holds keys to come."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpbilevel.cli import results
from dpbilevel.cli import run as runner
from dpbilevel.cli.config import read_config
from dpbilevel.cli.main import main
from dpbilevel.cli.plans import prepare
from dpbilevel.privacy.keys import NAMES, derive, step_keys
from dpbilevel.runs import checkpoint, spending
from tests.cli.test_runner import GENERATED

STEPS = 4
ROOT = np.asarray([0xA1B2C3D4, 0xE5F60718], np.uint32)


def root_key(*_):
    return jax.random.wrap_key_data(ROOT)


@jax.jit
def step_and_below(key):
    """The words of the keys of a step, two levels deep, and the key after it."""
    key, (step,) = step_keys(key, 1)
    # A copy to show: a key that is derived from is used up.
    words = [jax.random.key_data(jax.random.clone(step))[None]]
    below = derive(step, *NAMES)
    words.append(jax.random.key_data(jax.random.clone(below)))
    lowest = jax.vmap(lambda key: derive(key, *NAMES))(below)
    words.append(jax.random.key_data(lowest).reshape(-1, 2))
    return key, jnp.concatenate(words)


@pytest.fixture(scope="module")
def chain():
    """The key before each step, and the keys that the step uses, two levels deep."""
    key, steps = root_key(), []
    for _ in range(STEPS):
        before = np.asarray(jax.random.key_data(key))
        key, used = step_and_below(key)
        steps.append((before, [*np.asarray(used)]))
    return steps


def spellings(words):
    """What a key of two words looks like in a file or a text."""
    raw = [words.astype(order).tobytes() for order in ("<u4", ">u4")]
    raw += [words[::-1].astype(order).tobytes() for order in ("<u4", ">u4")]
    whole = (int(words[0]) << 32) + int(words[1])
    for number in (*map(int, words), whole):
        for form in ("d", "x", "X"):
            text = format(number, form).encode()
            raw += [text] if len(text) >= 8 else []
    return raw


def holds(content, *keys):
    """Whether a text holds one of these keys, however it is written."""
    forms = {}
    for words in keys:
        for form in spellings(words):
            forms.setdefault(len(form), set()).add(form)
    # Looked up at every place of the text, as there are thousands of keys.
    return any(
        content[i : i + length] in known
        for length, known in forms.items()
        for i in range(len(content) - length + 1)
    )


def all_keys(chain):
    for before, used in chain:
        yield from (before, *used)


@pytest.mark.parametrize("form", range(10))
def test_the_search_finds_a_key_however_it_is_written(form):
    assert holds(b"x" * 7 + spellings(ROOT)[form] + b"y", ROOT)
    assert not holds(b"x" * 50, ROOT)


def test_no_key_is_in_a_file_a_log_or_a_text(tmp_path, monkeypatch, capfd, chain):
    monkeypatch.setattr(runner, "root_key", root_key)
    (tmp_path / "a.toml").write_text(GENERATED)
    config, out = str(tmp_path / "a.toml"), tmp_path / "out"
    assert main(["run", config, "--out", str(out)]) == 0
    assert main(["report", str(out)]) == 0
    prepared = prepare(read_config(config))
    objects = [prepared, prepared.solver, prepared.report, prepared.config]
    objects += [results.load(out), spending.read(out)]
    texts = [text for o in objects for text in (repr(o), str(o))]
    files = [p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()]
    assert len(files) == 4
    content = b"\n".join([*files, *(t.encode() for t in (*texts, *capfd.readouterr()))])
    assert not holds(content, *all_keys(chain))
    # The control: the search sees one of so many.
    assert holds(content + chain[-1][1][-1].tobytes(), *all_keys(chain))


@pytest.mark.slow
def test_checkpoints_hold_the_key_to_come_and_none_that_was_used(
    tmp_path, monkeypatch, chain
):
    monkeypatch.setattr(runner, "root_key", root_key)
    (tmp_path / "a.toml").write_text(GENERATED)
    file, seen = tmp_path / "out" / checkpoint.NAME, []

    def look(done):
        assert file.stat().st_mode & 0o777 == 0o600
        assert repr(checkpoint.read(file.parent)) == f"Checkpoint(done={done})"
        seen.append(file.read_bytes())

    runner.run(
        prepare(read_config(tmp_path / "a.toml")), tmp_path / "out", progress=look
    )
    assert len(seen) == STEPS + 1
    for done, content in enumerate(seen):
        assert not holds(content, *all_keys(chain[:done]))
        # The control: the search sees the one key that is there.
        assert done == STEPS or holds(content, chain[done][0])
    assert not file.exists()


@pytest.mark.reuses_keys
def test_the_key_of_the_steps_to_come_gives_none_of_the_steps_done(chain):
    # What a thief of the second checkpoint can derive, two levels deep.
    @jax.jit
    def reachable(key):
        near = [key[None], derive(key, *NAMES), jax.random.split(key, 100)]
        near = jnp.concatenate(near)
        far = jax.vmap(lambda key: derive(key, *NAMES))(near)
        return [jax.random.key_data(keys).reshape(-1, 2) for keys in (near, far)]

    thief = jax.random.wrap_key_data(chain[2][0])
    words = np.concatenate(reachable(thief))
    reached = {word.tobytes() for word in words}
    used = {words.tobytes() for words in all_keys(chain[:2])}
    assert not reached & used
    assert reached & {words.tobytes() for words in all_keys(chain[2:])}
