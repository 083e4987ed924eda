"""`python -m dropkv_cli`, for a Python without the script on its path."""

from dropkv_cli.main import main

try:
    main()
finally:
    # A Ctrl-C that struck inside exec() of a string, as a dataclass or namedtuple runs one, is remembered although we caught it, and
    # `python -m` would kill itself with SIGINT in the end: our exit code would be lost. The next exec() makes it forget.
    exec("")
