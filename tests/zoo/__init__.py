"""Problems with answers in closed form."""
