"""Problems, data, applications and problems with known answers."""
