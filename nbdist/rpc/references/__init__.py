"""Remote references: the object that a user has, the counting of references, and descriptions of the values.

=================  ===============================================================================
`inert`            reads an object without running code of its class
`news`             tells displays that a reference has changed
`describing`       describes a value to its users: type, shape and size, or the error in its place
`reference_table`  the values that an agent owns; carries out what `forks` decides
`peeking`          describes a value by numbers that its owner computes
`rref`             `RRef`, the object that a user has
`forker`           the references in one message
=================  ===============================================================================
"""
