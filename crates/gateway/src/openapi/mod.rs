//! The description of both listeners as OpenAPI 3.1, served at `/openapi.json` of the admin listener. Requests are read
//! field by field within bounds and not into types, so that there is nothing to derive a description from: it stands
//! here, one operation for each route of the router's tables. A test compares the two.

mod admin;
mod inference;
mod kept;
mod schemas;

use crate::router::{RouteSpec, Scope};
use axum::{
    http::{HeaderValue, header},
    response::{IntoResponse, Response},
};
use serde_json::{Map, Value, json};
use std::sync::LazyLock;

/// One operation.
pub(crate) struct Operation {
    route: RouteSpec,
    summary: &'static str,
    query: Vec<Value>,
    body: Option<Value>,
    answers: Vec<(u16, Value)>,
    error: &'static str,
}

impl Operation {
    fn new(method: &'static str, path: &'static str, scope: Scope, summary: &'static str) -> Self {
        let route = RouteSpec { method, path, scope };
        Self { route, summary, query: Vec::new(), body: None, answers: Vec::new(), error: "Error" }
    }

    /// A parameter behind the `?`.
    fn query(mut self, name: &str, schema: &Value, description: &str) -> Self {
        self.query.push(json!({ "name": name, "in": "query", "schema": schema, "description": description }));
        self
    }

    /// A body of JSON, one of the named schemas.
    fn body(mut self, schema: &str) -> Self {
        self.body = Some(json!({ "required": true, "content": content("application/json", &named(schema)) }));
        self
    }

    /// A body that is a form with files.
    fn form(mut self, schema: &str) -> Self {
        self.body = Some(json!({ "required": true, "content": content("multipart/form-data", &named(schema)) }));
        self
    }

    /// A body of JSON that may be left out.
    fn optional_body(mut self, schema: &str) -> Self {
        self.body = Some(json!({ "required": false, "content": content("application/json", &named(schema)) }));
        self
    }

    /// An answer of JSON, one of the named schemas.
    fn answers(self, status: u16, schema: &str) -> Self {
        self.answers_with(status, "application/json", &named(schema))
    }

    /// An answer of another kind, beside or instead of JSON.
    fn answers_with(mut self, status: u16, kind: &str, schema: &Value) -> Self {
        let more = content(kind, schema);
        if let Some((_, answer)) = self.answers.iter_mut().find(|(known, _)| *known == status) {
            if let (Some(known), Value::Object(more)) = (answer["content"].as_object_mut(), more) {
                known.extend(more);
            }
        } else {
            self.answers.push((status, json!({ "description": reason(status), "content": more })));
        }
        self
    }

    /// An answer that comes as server-sent events, perhaps only if `stream` asks for it.
    fn streams(self) -> Self {
        self.answers_with(200, "text/event-stream", &named("Event"))
    }

    /// Errors in another form than OpenAI's.
    fn errors(mut self, schema: &'static str) -> Self {
        self.error = schema;
        self
    }

    /// The path in OpenAPI's notation, and its parameters.
    fn path(&self) -> (String, Vec<Value>) {
        let path = self.route.path.replace("{*", "{");
        let names = path.split('{').skip(1).filter_map(|rest| rest.split('}').next()).map(str::to_owned);
        let parameter = |name: String| json!({ "name": name, "in": "path", "required": true, "schema": { "type": "string", "minLength": 1 } });
        let parameters = names.map(parameter).collect();
        (path, parameters)
    }

    fn document(&self) -> Value {
        let (path, mut parameters) = self.path();
        parameters.extend(self.query.iter().cloned());
        let mut responses = Map::new();
        for (status, answer) in &self.answers {
            responses.insert(status.to_string(), answer.clone());
        }
        let error =
            json!({ "description": "refused or failed", "content": content("application/json", &named(self.error)) });
        responses.insert("default".into(), error);
        let identity: String =
            path.chars().map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '_' }).collect();
        let mut document = json!({
            "operationId": format!("{}{identity}", self.route.method.to_lowercase()),
            "summary": self.summary,
            "tags": [scope_name(self.route.scope)],
            "x-warmset-scope": scope_name(self.route.scope),
            "parameters": parameters,
            "responses": responses,
        });
        if let Some(body) = &self.body {
            document["requestBody"] = body.clone();
        }
        if self.route.scope == Scope::Admin {
            document["security"] = json!([{ "adminKey": [] }, {}]);
        }
        document
    }
}

fn content(kind: &str, schema: &Value) -> Value {
    json!({ kind: { "schema": schema } })
}

fn named(schema: &str) -> Value {
    json!({ "$ref": format!("#/components/schemas/{schema}") })
}

fn reason(status: u16) -> &'static str {
    axum::http::StatusCode::from_u16(status).ok().and_then(|status| status.canonical_reason()).unwrap_or("answer")
}

/// The name of a scope.
pub(crate) fn scope_name(scope: Scope) -> &'static str {
    match scope {
        Scope::Health => "health",
        Scope::Inference => "inference",
        Scope::Admin => "admin",
    }
}

fn operations() -> Vec<Operation> {
    let mut all = inference::operations();
    all.extend(admin::operations());
    all
}

/// The whole document.
pub fn document() -> Value {
    let mut paths = Map::new();
    for operation in operations() {
        let item = paths.entry(operation.path().0).or_insert_with(|| json!({}));
        item[operation.route.method.to_lowercase()] = operation.document();
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Warmset",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Many models from one pool of memory. Routes of the scopes health and inference are on the \
                            inference listener, those of the scope admin on the admin listener.",
            "license": { "name": "Apache-2.0", "identifier": "Apache-2.0" },
        },
        "servers": [
            { "url": "http://127.0.0.1:8080", "description": "inference" },
            { "url": "http://127.0.0.1:8081", "description": "administration" },
        ],
        "paths": paths,
        "components": {
            "schemas": schemas::all(),
            "securitySchemes": { "adminKey": { "type": "http", "scheme": "bearer" } },
        },
    })
}

/// `/openapi.json`.
pub(crate) async fn show() -> Response {
    static TEXT: LazyLock<String> = LazyLock::new(|| document().to_string());
    ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], TEXT.as_str()).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::router::{admin_routes, inference_routes};
    use std::collections::BTreeSet;

    fn line(route: &RouteSpec) -> String {
        format!("{} {} {}", route.method, route.path, scope_name(route.scope))
    }

    #[test]
    fn every_route_is_described_and_everything_described_is_a_route() {
        let routes: BTreeSet<String> = inference_routes().iter().chain(&admin_routes()).map(line).collect();
        let described: BTreeSet<String> = operations().iter().map(|operation| line(&operation.route)).collect();
        let missing: Vec<&String> = routes.difference(&described).collect();
        assert!(missing.is_empty(), "describe these routes in crates/gateway/src/openapi: {missing:#?}");
        let gone: Vec<&String> = described.difference(&routes).collect();
        assert!(gone.is_empty(), "these are described and not there, or have another scope: {gone:#?}");
        assert_eq!(operations().len(), described.len(), "nothing is described twice");
    }

    #[test]
    fn every_schema_that_is_named_is_there_and_used() {
        let document = document();
        let text = document.to_string();
        let named: BTreeSet<&str> =
            text.split("\"#/components/schemas/").skip(1).filter_map(|rest| rest.split('"').next()).collect();
        let defined: BTreeSet<&str> =
            document["components"]["schemas"].as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(named, defined);
    }

    #[test]
    fn operations_have_identities_of_their_own_and_answers() {
        let document = document();
        let mut identities = BTreeSet::new();
        for (path, item) in document["paths"].as_object().unwrap() {
            for (method, operation) in item.as_object().unwrap() {
                assert!(identities.insert(operation["operationId"].as_str().unwrap().to_owned()), "{path}");
                let answers = operation["responses"].as_object().unwrap();
                assert!(answers.len() > 1, "{method} {path} says what it answers with");
                assert!(!operation["summary"].as_str().unwrap().is_empty());
            }
        }
    }
}
