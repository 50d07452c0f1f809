"""Every attention behind one interface: METHODS is the one table, `build` makes a module from a name."""

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
    "build",
    "choose_budget",
    "cluster_attention",
    "skein_attention",
]
