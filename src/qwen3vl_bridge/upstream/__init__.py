"""Access to private names of other packages, one module for each purpose.

Only these modules use private attributes of other packages, or replace functions of other packages (borrowed names).
Each module says which names it uses, why, and when it can be deleted. From this project the modules import only `lazy`
and each other; other functions of this project are passed to them as arguments.
"""
