"""``python -m sb3_per.zoo train ...``"""

import sys

from sb3_per.zoo import main

sys.exit(main())
