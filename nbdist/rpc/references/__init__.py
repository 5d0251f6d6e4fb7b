"""Remote references: what users hold, how holders are counted, and what is known of the values behind.

=======================  ============================================================
`rref`                   `RRef`, the object that a user has
`forks`                  counts who refers to a value; decides, and does nothing else
`table`                  the values that an agent owns; does what `forks` decides
`forker`                 the references inside of one message
`describing`, `peeking`  describe a value: its type and shape; numbers about it
`inert`                  reads an object without running code of its class
`news`                   tells displays that a reference has changed
=======================  ============================================================
"""
