"""The autotuner: any Triton kernel's configs, measured and remembered. It knows no product of tritile's.

How `@tritile.autotune` becomes a measured winner:

    autotuner     `autotune` decorates; `Autotuner.run` finds a config for a call and launches it
    decorated     one call: its configs compiled, timed and checked, in processes of their own or in this one
    arguments     checks the decorator's arguments; names configs and values of keys, as the store does
    search        proposes the configs of a space
    spread        mode "spread": measures a problem while its calls go on
    traced        shows torch.compile the remembered config
    sync          ranks of a process group exchange what they measured, and choose alike
    adoption      the tuner under kernels that somebody else decorated with triton.autotune
    plan          what a call of a decorated kernel would run, and why
    measure       compiles in parallel, and times in processes that may be killed
    store         trials, and tables of winners

tritile's own operations are a client: `tritile.tune` makes their configs, operands and checks.
"""
