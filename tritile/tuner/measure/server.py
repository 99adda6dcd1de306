"""Start the fork server of `workers`: as it is needed, or early, while a program is still loading.

The server imports torch, which takes seconds. So adoption starts one as Triton is imported, unless the same
program measured nothing in its last run. Only the standard library is imported here, and not tritile.
"""

import atexit
import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

_PROGRAM: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from tritile.tuner.measure.workers import Connection, serve; serve(Connection(int(sys.argv[1])))"
)
_FEWEST_CORES: Final = 4  # to start early: on fewer it would slow the program's own start
_GPU_FILES: Final = "/dev/nvidiactl", "/dev/kfd"
Server = tuple["subprocess.Popen[bytes]", int]  # and the file descriptor of this end of the connection
_early: Server | None = None  # started, and not taken yet
_quiet: Path | None = None  # exists if this program's last run measured nothing
_measures = False  # True once the server was needed


def environment() -> dict[str, str]:
    """Return the variables for the server, whose processes log nothing and adopt no kernels."""
    return {n: v for n, v in os.environ.items() if not n.startswith(("TRITILE_LOG", "TRITILE_ADOPT"))}


def started() -> Server:
    """Start a server. Raises OSError."""
    if not sys.executable or getattr(sys, "frozen", False):  # embedded, or the program itself
        raise OSError("no Python can be started: this one is embedded or frozen")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            # -P: else a json.py in the current folder would be imported before sys.path is set.
            [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno()), json.dumps([*map(str, sys.path)])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # where Triton prints the assembly if ptxas fails
            pass_fds=(theirs.fileno(),),
            process_group=0,  # a terminal's signals go only to the caller
            env=environment(),
        )
        return process, ours.detach()


def take() -> Server:
    """Return the server that was started early, or start one. Raises OSError."""
    global _early, _measures
    taken, _early, _measures = _early, None, True
    if taken is not None:
        if taken[0].poll() is None:
            return taken
        os.close(taken[1])
    return started()


# Early.


def start_early(mode: str | None = None) -> None:
    """Start a server if kernels will probably be measured in this process; `mode` is that of an adoption."""
    global _early, _quiet
    mode = mode or os.environ.get("TRITILE_ADOPT_MODE") or os.environ.get("TRITILE_MODE")
    if _early is not None or _quiet is not None or not _may_measure(mode):
        return
    with contextlib.suppress(OSError, RuntimeError):  # nothing can be written, so no trial is kept either
        # As `settings.cache_dir` finds it on Linux, without platformdirs.
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "tritile")
        folder = Path(os.environ.get("TRITILE_CACHE_DIR") or folder).expanduser() / "quiet"
        folder.mkdir(parents=True, exist_ok=True)
        program = os.fsencode(Path((sys.argv or [""])[0]).absolute())
        _quiet = folder / hashlib.sha256(program).hexdigest()[:16]
        atexit.register(_note)
        if not _quiet.exists():
            _early = started()


def _may_measure(mode: str | None) -> bool:
    if mode not in (None, "", "tune", "spread") or os.environ.get("TRITON_INTERPRET"):
        return False
    has_gpu = any(map(os.path.exists, _GPU_FILES))
    shows_gpu = os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")
    return has_gpu and shows_gpu and (os.cpu_count() or 1) >= _FEWEST_CORES


def _note() -> None:
    """Note at exit whether anything was measured, and end a server that was not needed."""
    if _early is not None:
        _early[0].kill()
        _early[0].wait()
    with contextlib.suppress(OSError):
        if _quiet is not None and _measures:
            _quiet.unlink(missing_ok=True)
        elif _quiet is not None:
            _quiet.touch()


def _after_fork() -> None:
    """Leave the server to the parent in a forked child."""
    global _early, _quiet
    if _early is not None:
        os.close(_early[1])
    _early = _quiet = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
