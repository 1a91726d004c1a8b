"""The paper's numbers. Importing them costs nothing: the command line shows them without torch."""

import math

TAU = 10.0
"""The lengthscale, in tokens."""

HEIGHT = math.exp(0.5)
"""alpha = beta = e^½ leave the nearest tokens alone: a_0 = 1, m_0 = 0."""
