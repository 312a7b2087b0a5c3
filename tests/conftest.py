"""One thread per process, as tests run side by side; set before torch is imported, and for the processes they start."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
