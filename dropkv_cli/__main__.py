"""`python -m dropkv_cli`, for a Python without the script on its path."""

import signal

from dropkv_cli.main import INTERRUPTED, main

try:
    main()
except SystemExit as ending:
    # A Ctrl-C that struck inside exec() of a string, as in a dataclass, is remembered by `python -m` although we caught it:
    # Python then kills itself with SIGINT after this line, and our exit code is lost. Blocked, the signal does nothing.
    if ending.code == INTERRUPTED and hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    raise
