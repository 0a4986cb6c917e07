"""python3 -m e2e.cluster"""

import sys

from .cli import main

sys.exit(main())
