"""The command line: `fedbilevel COMMAND`.

`app` lists the commands, each of which has a module. Modules that import PyTorch or take long to
import are imported when a command runs, so that `fedbilevel --help` answers at once.
"""

from fedbilevel.cli.app import main as main
