"""Every attention behind one interface: METHODS is the one table, `build` makes a module from a name."""

from skeinformer.attention.adaptive import Adaptive, AdaptiveInfo, AdaptiveNoise, adaptive_attention
from skeinformer.attention.base import Attention, Method
from skeinformer.attention.budget import choose_budget
from skeinformer.attention.certificate import Info
from skeinformer.attention.cluster import Cluster, ClusterInfo, ClusterNoise, cluster_attention
from skeinformer.attention.skein import Skeinformer, SkeinInfo, SkeinNoise, skein_attention
from skeinformer.attention.table import ADAPTIVE, DEFAULT, METHODS, Entry, build
from skeinformer.attention.virtual_keys import VirtualKeys

__all__ = [
    "ADAPTIVE",
    "DEFAULT",
    "METHODS",
    "Adaptive",
    "AdaptiveInfo",
    "AdaptiveNoise",
    "Attention",
    "Cluster",
    "ClusterInfo",
    "ClusterNoise",
    "Entry",
    "Info",
    "Method",
    "SkeinInfo",
    "SkeinNoise",
    "Skeinformer",
    "VirtualKeys",
    "adaptive_attention",
    "build",
    "choose_budget",
    "cluster_attention",
    "skein_attention",
]
