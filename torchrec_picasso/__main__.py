"""``python -m torchrec_picasso``: the command line."""

import os
import sys

from torchrec_picasso.app.cli.main import main
from torchrec_picasso.app.launch.torchrun import under_torchrun

if __name__ == "__main__":
    exit_code = main()
    if under_torchrun():
        # at once: threads of gloo may outlive their group, and an interpreter that ends beside
        # them may abort, which torchrun would take for a failed run
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)
