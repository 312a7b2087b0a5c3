"""The launchers by name. To add a launcher, write its file and add its line here."""

from aidgn.sweeps.launchers.base import Launcher
from aidgn.sweeps.launchers.local import LocalLauncher
from aidgn.sweeps.launchers.ray import RayLauncher
from aidgn.sweeps.launchers.slurm import SlurmLauncher

__all__ = ["LAUNCHERS", "Launcher"]

LAUNCHERS: dict[str, type[Launcher]] = {"local": LocalLauncher, "ray": RayLauncher, "slurm": SlurmLauncher}
