// Without search, which would need a script made on the fly.
Redoc.init("openapi.json", { disableSearch: true }, document.getElementById("page"));
