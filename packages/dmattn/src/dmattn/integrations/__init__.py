"""dmattn inside other libraries, each in a module that imports its library only when it is used."""
