"""``python -m torchrec_picasso``: the command line."""

import os
import sys

from torchrec_picasso.app.cli.main import main
from torchrec_picasso.app.launch.torchrun import under_torchrun

if __name__ == "__main__":
    exit_code = main()
    if under_torchrun():
        # exit without interpreter shutdown: it may abort while threads of gloo still run, and
        # torchrun would report a failed run
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)
