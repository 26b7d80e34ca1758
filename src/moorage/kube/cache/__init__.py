"""Local caches of API objects, kept current by watches."""
