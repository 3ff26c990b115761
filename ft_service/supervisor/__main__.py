"""Run the supervisor: `python -m ft_service.supervisor RUN_DIR ATTEMPT`, as a process of a host or
as PID 1 of a pod.
"""

import sys

from ft_service.supervisor.supervisor import main

sys.exit(main())
