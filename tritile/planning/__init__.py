"""Turn a problem into a config: measured here, shipped in a table, or predicted.

| question | where |
| --- | --- |
| Where does a shape become a config? | `plans.plan_for` |
| What happens at a miss? | `plans._chosen`: one source after the other, up to the model's pick |
| What is the key of a remembered trial? | the head of `trial` |
| Where are trials remembered? | `store.Store`, one SQLite file a GPU model |
| Which table serves a GPU, and how is a GPU added? | `gpu_tables` |
| What does a class's portfolio predict? | `classes`, `portfolio`, `formula` |
| What if nothing is known? | `model` ranks all configs by their family's own estimate |
| Is torch's kernel faster? | `aten` predicts its time; `plans._or_aten` compares |
"""
