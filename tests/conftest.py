"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# Workers of pytest-xdist share the cores among them: their threads would wait for one another's.
if "PYTEST_XDIST_WORKER" in os.environ and hasattr(os, "sched_setaffinity"):
    _worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    _n_workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    _cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, _cores[_worker % len(_cores) :: _n_workers])
# So would those of NumPy, which reads this at import and spins: a third of the time of tests/ops.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# onnxruntime, which some tests import by themselves, sends nothing.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from edgeh2o import _core
from edgeh2o.attention import kept_profiles
from edgeh2o.errors import ResourceError
from edgeh2o.evaluation import figures
from edgeh2o.formats.known_models import CACHE_VARIABLE, cache_folder
from edgeh2o.formats.model_cache import resolve_model
from tests.evaluation.pictures import checked_picture

pytest_plugins = ["tests.tiny_models"]

# A shell's background job ignores Ctrl-C and hands that down; the tests of Ctrl-C need it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# nohup does that with SIGHUP, which the tests of closed terminals need.
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model. Tests that use it are skipped without a network, and fail under CI."""
    try:
        return resolve_model("smollm2-135m")
    except ResourceError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"needs the default model: {error}")


@pytest.fixture(scope="session", autouse=True)
def _checks_pictures() -> Iterator[None]:
    """Whatever a test draws has labels and is not clipped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "picture", checked_picture)
        yield


@pytest.fixture(scope="session", autouse=True)
def _profile_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """Where profiles are kept unless a test sets a cache folder: one that is made when asked for.

    Emptying the list makes another one follow.
    """
    made: list[Path] = []

    def folder() -> Path:
        if CACHE_VARIABLE in os.environ:
            return cache_folder()
        if not made:
            made.append(tmp_path_factory.mktemp("profiles"))
        return made[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_profiles, "profile_folder", folder)
        yield made


@pytest.fixture(autouse=True)
def _leaves_nothing(_profile_folders: list[Path]) -> Iterator[None]:
    """What a test taught of a model, or forced with ``--isa``, is not there for those behind it.

    One fixture for both: of 15,000 tests each takes seconds.
    """
    before = _core.active_isa()
    yield
    _core.use_isa(before)
    _profile_folders.clear()


def pytest_configure(config: pytest.Config) -> None:
    """pytest-xdist hands out tests by forty at most.

    It would give one worker a quarter of what is left at a time: the other had nothing to do for
    the last minutes.
    """
    if getattr(config.option, "maxschedchunk", 0) is None:
        config.option.maxschedchunk = 40


def _without_isa(item: pytest.Item) -> str:
    """The name of a test that it has for every instruction set."""
    callspec = getattr(item, "callspec", None)
    isa = callspec.params.get("isa") if callspec else None
    return item.nodeid if isa is None else item.nodeid.replace(str(isa), "", 1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked ``first``, which take minutes, begin before all others: beside them, not after.

    One test with every instruction set stands together, as it asks the oracles the same.

    ``EDGEH2O_TEST_STEP=N`` runs every N-th test: a slow build is checked on a sample. A prime N
    meets every value of each parameter.
    """
    places: dict[str, int] = {}
    for place, item in enumerate(items):
        places.setdefault(_without_isa(item), place)
    items.sort(
        key=lambda item: (item.get_closest_marker("first") is None, places[_without_isa(item)])
    )
    step = int(os.environ.get("EDGEH2O_TEST_STEP", "1"))
    config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % step])
    items[:] = items[::step]
