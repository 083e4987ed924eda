"""`python -m dropkv_cli`, for a Python without the script on its path."""

from dropkv_cli.main import main

main()
