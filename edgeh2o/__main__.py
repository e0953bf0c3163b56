"""``python -m edgeh2o`` and ``edgeh2o``: settings of the whole process, then the command line."""

import gc
import os
import sys

from .errors import EXIT_INTERRUPTED, EdgeH2OError, is_shortage


def main() -> int:
    """Runs the process's command line; returns the exit code."""
    # Nothing here multiplies large matrices in NumPy, whose BLAS would start a thread per core, and
    # they spin at first.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Vocabularies are 100,000 objects that stay: looking through them for garbage again and again
    # takes longer than reading them.
    gc.set_threshold(100_000, 50, 100)
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


if __name__ == "__main__":
    sys.exit(main())
