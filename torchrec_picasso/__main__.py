"""``python -m torchrec_picasso``: the command line."""

import sys

from torchrec_picasso.cli.main import main

sys.exit(main())
