"""``python -m edgeh2o`` and ``edgeh2o``: settings of the whole process, then the command line."""

from __future__ import annotations

import gc
import os
import sys

from .errors import EXIT_INTERRUPTED, EdgeH2OError, is_shortage

_AGAIN_AFTER_S = 0.01


def main() -> int:
    """Runs the process's command line; returns the exit code."""
    # Nothing here multiplies large matrices in NumPy, whose BLAS would start a thread per core, and
    # they spin at first.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Vocabularies are 100,000 objects that stay: looking through them for garbage again and again
    # takes longer than reading them.
    gc.set_threshold(100_000, 50, 100)
    _keep_interrupts()
    try:
        from .cli.main import main as run_command_line

        return run_command_line()
    except KeyboardInterrupt:  # while the modules were imported
        print("edgeh2o: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:  # so too; the command line handles its own
        if not is_shortage(error):
            raise
        print("edgeh2o: error: out of memory; raise its limit (ulimit -v)", file=sys.stderr)
        return EdgeH2OError.exit_code


def _keep_interrupts() -> None:
    """Lets Ctrl-C count wherever it comes.

    Python drops what is raised in a callback of a weak reference, and imports are full of them: the
    program would go on as if nothing had been pressed.
    """
    from _thread import get_ident, interrupt_main, start_new_thread
    from time import sleep

    report, main_thread = sys.unraisablehook, get_ident()

    def press_again() -> None:
        sleep(_AGAIN_AFTER_S)  # not to be dropped once more
        if sys.platform == "win32":
            interrupt_main()
        else:  # which wakes a thread that waits, too
            from signal import SIGINT, pthread_kill

            pthread_kill(main_thread, SIGINT)

    def keep(dropped: sys.UnraisableHookArgs) -> None:
        if dropped.exc_type is KeyboardInterrupt:
            start_new_thread(press_again, ())
        else:
            report(dropped)

    sys.unraisablehook = keep


if __name__ == "__main__":
    sys.exit(main())
