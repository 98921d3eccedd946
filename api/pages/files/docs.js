// A file of its own, since the page's policy runs no script that stands in it.
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#page",
  deepLinking: true,
  validatorUrl: "none", // it would send the document to another host
});
