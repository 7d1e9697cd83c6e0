"""`python -m radixlink`: the command, where no script is on the path."""

import sys

from radixlink._main import main

sys.exit(main())
