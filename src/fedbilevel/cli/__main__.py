"""`python -m fedbilevel.cli` is `fedbilevel`."""

from fedbilevel.cli import main

main()
