"""moeray: expert-parallel serving of Mixture-of-Experts language models over Ray.

The five folders of the repository's top level are imported through this package (`moeray.worker`, `moeray.comm`, ...).
"""

__version__ = "0.1.0"
