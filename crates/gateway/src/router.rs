//! Both listeners' routes, each with the scope that guards it: what is not in these tables is not there.

use crate::{
    admin::{self, AdminBackend, AdminState},
    batches::{self, Batches},
    errors::ApiError,
    fallback,
    frontend::Frontend,
    jobs::{self, Jobs},
    openai::{self, Api, ApiConfig, ReadyProbe},
    openapi,
};
use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
    routing::{MethodRouter, delete, get, post},
};
use std::{sync::Arc, time::Duration};

/// Who may use a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Anybody: probes.
    Health,
    /// Callers of models.
    Inference,
    /// Administrators.
    Admin,
}

/// One route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouteSpec {
    /// The method.
    pub method: &'static str,
    /// The path, in axum's notation.
    pub path: &'static str,
    /// Who may use it.
    pub scope: Scope,
}

type Table<S> = Vec<(RouteSpec, MethodRouter<S>)>;

fn route<S: Clone + Send + Sync + 'static, H, T>(
    method: &'static str,
    path: &'static str,
    scope: Scope,
    handler: H,
) -> (RouteSpec, MethodRouter<S>)
where
    H: axum::handler::Handler<T, S>,
    T: 'static,
{
    let handle = match method {
        "POST" => post(handler),
        "DELETE" => delete(handler),
        _ => get(handler),
    };
    (RouteSpec { method, path, scope }, handle)
}

fn inference_table() -> Table<Api> {
    use Scope::{Health, Inference};
    vec![
        route("GET", "/health/live", Health, live),
        route("GET", "/health/ready", Health, ready),
        route("POST", "/v1/chat/completions", Inference, openai::chat_completions),
        route("POST", "/v1/completions", Inference, openai::completions),
        route("POST", "/v1/embeddings", Inference, openai::embeddings),
        route("POST", "/v1/responses", Inference, openai::responses),
        route("GET", "/v1/responses/{name}", Inference, openai::background::show),
        route("POST", "/v1/responses/{name}/cancel", Inference, openai::background::cancel),
        route("POST", "/v1/messages", Inference, openai::messages),
        route("POST", "/v1/messages/count_tokens", Inference, openai::count_tokens),
        route("GET", "/v1/models", Inference, openai::list_models),
        route("GET", "/v1/models/{*name}", Inference, openai::show_model),
        route("GET", "/v1/jobs/{name}", Inference, jobs::show),
        route("DELETE", "/v1/jobs/{name}", Inference, jobs::cancel),
        route("POST", "/v1/files", Inference, batches::upload),
        route("GET", "/v1/files", Inference, batches::list_files),
        route("GET", "/v1/files/{name}", Inference, batches::show_file),
        route("DELETE", "/v1/files/{name}", Inference, batches::delete_file),
        route("GET", "/v1/files/{name}/content", Inference, batches::download),
        route("POST", "/v1/batches", Inference, batches::create),
        route("GET", "/v1/batches", Inference, batches::list),
        route("GET", "/v1/batches/{name}", Inference, batches::show),
        route("POST", "/v1/batches/{name}/cancel", Inference, batches::cancel),
    ]
}

fn admin_table() -> Table<AdminState> {
    use Scope::Admin;
    vec![
        route("GET", "/openapi.json", Admin, openapi::show),
        route("GET", "/metrics", Admin, admin::metrics),
        route("GET", "/admin/v1/models", Admin, admin::list_models),
        route("POST", "/admin/v1/models", Admin, admin::add_model),
        route("GET", "/admin/v1/models/{name}", Admin, admin::show_model),
        route("DELETE", "/admin/v1/models/{name}", Admin, admin::remove_model),
        route("POST", "/admin/v1/models/{name}/pin", Admin, admin::pin_model),
        route("POST", "/admin/v1/models/{name}/unpin", Admin, admin::unpin_model),
        route("POST", "/admin/v1/models/{name}/load", Admin, admin::load_model),
        route("POST", "/admin/v1/models/{name}/unload", Admin, admin::unload_model),
        route("GET", "/admin/v1/models/{name}/logs", Admin, admin::model_logs),
        route("POST", "/admin/v1/models/{name}/{action}", Admin, admin::act_on_model),
        route("GET", "/admin/v1/workers", Admin, admin::workers),
        route("GET", "/admin/v1/ledger", Admin, admin::ledger),
        route("GET", "/admin/v1/kv", Admin, admin::kv),
        route("DELETE", "/admin/v1/kv", Admin, admin::clear_kv),
        route("GET", "/admin/v1/events", Admin, admin::events),
        route("GET", "/admin/v1/recording", Admin, admin::recording),
        route("POST", "/admin/v1/drain", Admin, admin::drain),
        route("GET", "/admin/v1/jobs", Admin, jobs::admin_list),
        route("GET", "/admin/v1/jobs/{name}", Admin, jobs::admin_show),
        route("DELETE", "/admin/v1/jobs/{name}", Admin, jobs::admin_cancel),
        route("GET", "/admin/v1/batches", Admin, batches::admin_list),
        route("GET", "/admin/v1/batches/{name}", Admin, batches::admin_show),
        route("DELETE", "/admin/v1/batches/{name}", Admin, batches::admin_cancel),
        route("POST", "/admin/v1/reload", Admin, admin::reload),
    ]
}

/// Every route of the inference listener.
pub fn inference_routes() -> Vec<RouteSpec> {
    inference_table().into_iter().map(|(spec, _)| spec).collect()
}

/// Every route of the admin listener.
pub fn admin_routes() -> Vec<RouteSpec> {
    admin_table().into_iter().map(|(spec, _)| spec).collect()
}

fn build<S: Clone + Send + Sync + 'static>(table: Table<S>) -> Router<S> {
    let router = table.into_iter().fold(Router::new(), |router, (spec, handler)| router.route(spec.path, handler));
    router
        .fallback(|request: Request| async move { ApiError::no_such_route(request.uri().path()) })
        .method_not_allowed_fallback(|| async { ApiError::method_not_allowed() })
}

/// What is answered later.
#[derive(Debug, Default, Clone)]
pub struct Later {
    /// Requests that were accepted with 202.
    pub jobs: Option<Jobs>,
    /// Files of requests.
    pub batches: Option<Batches>,
}

/// The inference listener: OpenAI's routes and the probes. `ready` adds what the program knows (a warm set that is
/// still loading, say) to what the gateway knows itself. Without
/// `later` every request is answered at once.
pub fn inference_router(frontend: Frontend, config: ApiConfig, ready: ReadyProbe, later: Later) -> Router {
    let api = Api { frontend, config: Arc::new(config), ready, later };
    let fall_back = axum::middleware::from_fn_with_state(api.clone(), fallback::fall_back);
    build(inference_table()).layer(fall_back).with_state(api)
}

/// The admin listener. Every route of it needs a key once there is one.
pub fn admin_router(frontend: Frontend, backend: Arc<dyn AdminBackend>, access: admin::AdminAccess) -> Router {
    let access = Arc::new(access);
    let guard = axum::middleware::from_fn_with_state(access, admin::guard);
    // The fallbacks lie behind the guard too: without a key nobody learns what is there.
    build(admin_table()).layer(guard).with_state(AdminState { frontend, backend })
}

/// How long the run loop may take to answer before it counts as stuck.
const LIVENESS_TIMEOUT: Duration = Duration::from_secs(5);

/// Alive: the run loop answers. Never that a model is loaded, or a slow load would be a restart loop.
async fn live(State(api): State<Api>) -> Response {
    match api.frontend.figures(LIVENESS_TIMEOUT).await {
        Some(_) => plain(StatusCode::OK, "live\n".to_owned()),
        None => plain(StatusCode::SERVICE_UNAVAILABLE, "the gateway's run loop does not answer\n".to_owned()),
    }
}

/// Ready: accepting requests now.
async fn ready(State(api): State<Api>) -> Response {
    let ready = api.frontend.accepts().map_err(str::to_owned).and_then(|()| (api.ready)());
    match ready {
        Ok(()) => plain(StatusCode::OK, "ready\n".to_owned()),
        Err(reason) => plain(StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
    }
}

fn plain(status: StatusCode, text: String) -> Response {
    let kind = HeaderValue::from_static("text/plain; charset=utf-8");
    (status, [(header::CONTENT_TYPE, kind)], text).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Every route and who may use it: a new one is added here by hand, so that nobody opens a door in passing.
    const ROUTES: &str = include_str!("routes.txt");

    #[test]
    fn the_list_of_routes_and_scopes_is_complete() {
        let lines = |specs: Vec<RouteSpec>| {
            specs.into_iter().map(|spec| format!("{} {} {}", spec.method, spec.path, openapi::scope_name(spec.scope)))
        };
        let there: BTreeSet<String> = lines(inference_routes()).chain(lines(admin_routes())).collect();
        let listed: BTreeSet<String> = ROUTES.lines().map(str::to_owned).collect();
        let difference: Vec<&String> = there.symmetric_difference(&listed).collect();
        assert!(difference.is_empty(), "crates/gateway/src/routes.txt differs in {difference:#?}");
    }

    #[test]
    fn every_route_has_its_scope_and_admin_is_never_on_the_inference_listener() {
        for spec in inference_routes() {
            let expected = if spec.path.starts_with("/health/") { Scope::Health } else { Scope::Inference };
            assert_eq!(spec.scope, expected, "{spec:?}");
            assert!(spec.path.starts_with("/v1/") || spec.path.starts_with("/health/"), "{spec:?}");
        }
        for spec in admin_routes() {
            assert_eq!(spec.scope, Scope::Admin, "{spec:?}");
            assert!(
                spec.path.starts_with("/admin/v1/") || ["/metrics", "/openapi.json"].contains(&spec.path),
                "{spec:?}"
            );
        }
        let all: Vec<RouteSpec> = inference_routes().into_iter().chain(admin_routes()).collect();
        let distinct: BTreeSet<(&str, &str)> = all.iter().map(|spec| (spec.method, spec.path)).collect();
        assert_eq!(distinct.len(), all.len());
    }
}
