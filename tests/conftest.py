"""What holds for all tests."""

import os

# Threads that spin while they wait for each other keep the cores from everyone else: on a busy machine tests take many
# times longer. It has to be set before torch is imported, by the tests or by the processes that they start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
