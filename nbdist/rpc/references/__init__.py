"""Remote references: the object that a user has, the counting of references, and descriptions of the values.

=======================  ============================================================
`rref`                   `RRef`, the object that a user has
`forks`                  counts references to a value, and decides what follows; pure
`table`                  the values that an agent owns; carries out what `forks` decides
`forker`                 the references in one message
`describing`, `peeking`  describe a value: its type and shape; numbers about it
`inert`                  reads an object without running code of its class
`news`                   tells displays that a reference has changed
=======================  ============================================================
"""
