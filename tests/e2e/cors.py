"""Whose pages may call a service: BentoML's `http.cors`, of both kinds of service."""

ORIGIN = "http://page.example:8080"
CORS = {
    "enabled": True,
    "access_control_allow_origins": [ORIGIN],
    "access_control_allow_methods": ["GET", "POST"],
    "access_control_allow_headers": ["Content-Type"],
    "access_control_expose_headers": ["Content-Length"],
}
