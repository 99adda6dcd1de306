"""Let the two programs of a cluster tell each other which stages of shared memory are empty.

Gluon's `mbarrier.arrive` reaches barriers of its own program alone in triton 3.7, and has no name for an
address in shared memory, so these barriers lie beside Triton's shared memory, and PTX handles them.
Its barriers of clusters wait for all threads of a program, those of other partitions included.

Source: PTX ISA, `mapa`, `mbarrier` and `barrier.cluster`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def asm(text: gl.constexpr, constraints: gl.constexpr, args):
    """Return the int32 that PTX with side effects returns: each thread executes it."""
    return gl.inline_asm_elementwise(text, constraints, args, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def rank():
    """Return 0 in the cluster's first program, which copies what both read, and 1 in its second."""
    return asm("mov.u32 $0, %cluster_ctarank;", "=r", [])


@gluon.jit
def reserve():
    """Return the address of 1 KB of shared memory for barriers; Triton's own begins behind, on 1 KB too."""
    return asm("{ .shared .align 1024 .b8 stages[1024]; mov.u32 $0, stages; }", "=r", [])


@gluon.jit
def init(barriers, STAGES: gl.constexpr, WARPS: gl.constexpr):
    """Have each of STAGES barriers wait for WARPS of this program, and the first program's for both's."""
    expected = WARPS * (2 - rank())
    for stage in gl.static_range(STAGES):
        asm(
            """{
            .reg .pred first;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first mbarrier.init.shared::cta.b64 [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,r,r",
            [barriers + 8 * stage, expected],
        )


@gluon.jit
def meet():
    """Wait for all threads of the cluster; what they wrote before is visible after."""
    asm("barrier.cluster.arrive.release; barrier.cluster.wait.acquire; mov.u32 $0, 0;", "=r", [])


@gluon.jit
def addressed(barriers):
    """Return where this thread is to `arrive`: its program's barriers, the first program's, or, for most, 0.

    Of each warp the first thread arrives in its own program, and the second thread in the first program if
    that is the other one.
    """
    return asm(
        """{
        .reg .pred own, other;
        .reg .b32 lane, rank;
        mov.u32 lane, %laneid;
        mov.u32 rank, %cluster_ctarank;
        mov.u32 $0, 0;
        setp.eq.u32 own, lane, 0;
        setp.eq.u32 other, lane, 1;
        setp.ne.and.u32 other, rank, 0, other;
        @own mapa.shared::cluster.u32 $0, $1, rank;
        @other mapa.shared::cluster.u32 $0, $1, 0;
        }""",
        "=&r,r",
        [barriers],
    )


@gluon.jit
def arrive(places, stage):
    """Say that this warp has read `stage`: to the threads' `places`, which `addressed` returned.

    Tensor cores are done with reading, and nothing was written: no fence is needed, which would wait for all
    of the warp's stores.
    """
    asm(
        """{
        .reg .pred told;
        .reg .b32 at;
        setp.ne.u32 told, $1, 0;
        mad.lo.u32 at, $2, 8, $1;
        @told mbarrier.arrive.shared::cluster.b64 _, [at];
        mov.u32 $0, 0;
        }""",
        "=r,r,r",
        [places, stage],
    )


@gluon.jit
def wait(barriers, stage, phase):
    """Wait until all that read this program's copies to `stage` have arrived."""
    asm(
        """{
        .reg .pred done;
        .reg .b32 at;
        mad.lo.u32 at, $2, 8, $1;
        again:
        mbarrier.try_wait.parity.shared::cta.b64 done, [at], $3;
        @!done bra.uni again;
        mov.u32 $0, 0;
        }""",
        "=r,r,r,r",
        [barriers, stage, phase],
    )
