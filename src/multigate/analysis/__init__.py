"""What goes on inside a trained model: the paper's figures, as arrays, as files and as a page.

    from multigate import analysis

    arrays = analysis.angular_distance(model, tokens)    # tokens [samples, T]

Every function takes a `multigate.GPT` (or any module with a `Stack` as `stack`, called with
tokens) and returns arrays by name; a `Probe` shows every step to a watcher of your own.
"""

from .angles import angular_distance
from .dynamics import training_dynamics
from .gates import gate_statistics
from .life import stream_life
from .massive import massive_activations
from .mixing import mixing_maps
from .probe import Probe, Step, Watcher
from .pruning import block_pruning

__all__ = [
    "Probe",
    "Step",
    "Watcher",
    "angular_distance",
    "block_pruning",
    "gate_statistics",
    "massive_activations",
    "mixing_maps",
    "stream_life",
    "training_dynamics",
]
