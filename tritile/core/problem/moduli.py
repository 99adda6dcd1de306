"""List the moduli by whose remainders fp64 products are made on int8 tensor cores.

Source: the Chinese remainder theorem, used so in the "Ozaki scheme II" (Ozaki, Uchino, Imamura,
arXiv 2504.08009; Uchino, Ozaki, Imamura, arXiv 2508.03984).
"""

from math import prod
from typing import Final

# The set of 14 pairwise coprime numbers up to 256 with the largest product, 2^110.4. The remainders nearest 0
# fit int8; modulo 256 it is the low byte.
MODULI: Final = (256, 253, 251, 249, 247, 241, 239, 235, 233, 229, 227, 223, 217, 211)
RANGE: Final = prod(MODULI)
# The largest product of a row and a column, as integers. Half of RANGE is for the sign; 2^-10 of that is kept
# free, so that float64 finds which multiple of RANGE to subtract, whatever it rounds on the way.
REACH: Final = RANGE // 2 - RANGE // 2**11
# Remainders are at most 127 (128 modulo 256), and sums of MAX_DEPTH products of them fit int32. The one sum
# of 2^31, of -128 modulo 256 throughout, wraps to -2^31, which has the same remainder.
MAX_DEPTH: Final = 2**17
