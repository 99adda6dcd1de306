"""Moduli by whose remainders fp64 products are made on int8 tensor cores.

Source: the Chinese remainder theorem, used so in the "Ozaki scheme II" (Ozaki, Uchino, Imamura,
arXiv 2504.08009; Uchino, Ozaki, Imamura, arXiv 2508.03984).
"""

from math import prod
from typing import Final

# Of all sets of 14 pairwise coprime numbers up to 256 the one with the largest product, 2^110.4. Remainders,
# as near 0 as they go, fit int8; that of 256 is the low byte as it is.
MODULI: Final = (256, 253, 251, 249, 247, 241, 239, 235, 233, 229, 227, 223, 217, 211)
RANGE: Final = prod(MODULI)
# What a row times a column may reach, as integers. Half of RANGE tells the sign; 2^-10 of it is kept free, so
# that float64 finds which multiple of RANGE to take away, whatever it rounds on the way.
REACH: Final = RANGE // 2 - RANGE // 2**11
# Remainders are at most 127 (128 modulo 256), and sums of so many products of them fit int32. The one sum of
# 2^31, of nothing but -128 modulo 256, wraps to -2^31, which has the same remainder.
MAX_DEPTH: Final = 2**17
