//! Another model answers if the wanted one cannot: named by the caller (`models`) or by the wanted model itself.
//!
//! It stands before the routes, so every dialect has it. A model is given up for what it cannot do now (it is cold and
//! refuses, its load fails, it does not fit), never for what the caller sent, and never after a part of an answer: the
//! head of the response is looked at before anything of it is sent.

use crate::{
    directory::Directory,
    errors::{ApiError, Unavailable},
    openai::{Api, Bounded, Call, Fields, read_body, refuse},
};
use axum::{
    body::Body,
    extract::{Request, State},
    http::{HeaderName, HeaderValue, Method},
    middleware::Next,
    response::Response,
};
use bytes::Bytes;
use serde_json::value::RawValue;
use std::collections::{BTreeMap, BTreeSet};
use warmset_core::Digest;

/// Names the model that was wanted, where another one answered.
const FALLBACK_FOR: HeaderName = HeaderName::from_static("warmset-fallback-for");
/// How many models are asked after the wanted one.
pub(crate) const FALLBACKS_MAX: usize = 4;
/// Routes whose answers another model can give. Vectors of another model mean something else.
const ROUTES: [&str; 4] = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"];
/// The caller's own alternatives, in the order in which they are asked.
const FIELD: &str = "models";

/// Asks one model after the other until one does not say that it cannot.
pub(crate) async fn fall_back(State(api): State<Api>, request: Request, next: Next) -> Response {
    let applies = request.method() == Method::POST && ROUTES.contains(&request.uri().path());
    if !applies {
        return next.run(request).await;
    }
    let (head, body) = request.into_parts();
    let again = |body: Body| Request::from_parts(head.clone(), body);
    let read = async {
        let body = read_body(&api.config, again(body)).await?;
        let chain = chain(api.frontend.directory(), &body)?;
        Ok((body, chain))
    };
    let (body, chain) = match read.await {
        Ok(read) => read,
        Err(error) => return refuse(Call::new(&api.frontend, &head.extensions), error),
    };
    let mut first = next.clone().run(again(Body::from(body.clone()))).await;
    let Some(chain) = chain else { return first };
    for name in chain.rest {
        if first.extensions_mut().remove::<Unavailable>().is_none() {
            return first;
        }
        let Ok(body) = with_model(&body, &name) else { break };
        let mut response = next.clone().run(again(Body::from(body))).await;
        if response.extensions().get::<Unavailable>().is_none() {
            if let Ok(wanted) = HeaderValue::from_str(&chain.wanted) {
                response.headers_mut().insert(FALLBACK_FOR, wanted);
            }
            return response;
        }
        // If nobody can, what the wanted model said is the answer.
        first.extensions_mut().insert(Unavailable);
    }
    first
}

/// Whom to ask after the wanted model.
#[derive(Debug, PartialEq, Eq)]
struct Chain {
    wanted: String,
    rest: Vec<String>,
}

/// The alternatives to a request's model; none if there are none. Each digest is asked once.
fn chain(directory: &Directory, body: &Bytes) -> Result<Option<Chain>, ApiError> {
    let named = memchr::memmem::find(body, b"\"models\"").is_some();
    let snapshot = directory.snapshot();
    if !named && !snapshot.has_fallbacks() {
        return Ok(None);
    }
    // What is wrong with the body is told by its route.
    let Ok(fields) = Fields::parse(body) else { return Ok(None) };
    let Ok(Some(wanted)) = fields.text("model") else { return Ok(None) };
    let Some(entry) = directory.resolve(&wanted) else { return Ok(None) };
    let mut seen = BTreeSet::from([entry.route.digest]);
    let expected = format!("at most {FALLBACKS_MAX} names of models");
    let rest = match fields.read::<Bounded<String, FALLBACKS_MAX>>(FIELD, &expected)? {
        Some(Bounded(names)) => {
            let known = |name: &String| directory.resolve(name).map(|entry| entry.route.digest);
            let unknown = names.iter().find(|name| known(name).is_none());
            if let Some(name) = unknown {
                return Err(ApiError::model_not_found(name).of_param(FIELD));
            }
            names.into_iter().filter(|name| known(name).is_some_and(|digest| seen.insert(digest))).collect()
        }
        None => configured(directory, entry.fallback.as_ref().map(|name| name.as_str().to_owned()), &mut seen),
    };
    Ok((!rest.is_empty()).then_some(Chain { wanted, rest }))
}

/// Follows what models say of themselves. A name that leads nowhere ends the chain.
fn configured(directory: &Directory, first: Option<String>, seen: &mut BTreeSet<Digest>) -> Vec<String> {
    let mut rest = Vec::new();
    let mut next = first;
    while let Some(name) = next.take()
        && rest.len() < FALLBACKS_MAX
        && let Some(entry) = directory.resolve(&name)
        && seen.insert(entry.route.digest)
    {
        rest.push(name);
        next = entry.fallback.as_ref().map(|name| name.as_str().to_owned());
    }
    rest
}

/// The same request to another model.
fn with_model(body: &[u8], name: &str) -> serde_json::Result<Vec<u8>> {
    let mut fields: BTreeMap<&str, &RawValue> = serde_json::from_slice(body)?;
    let model = serde_json::value::to_raw_value(name)?;
    fields.insert("model", &model);
    fields.remove(FIELD);
    serde_json::to_vec(&fields)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::directory::Entry;
    use warmset_core::{
        ModelName, Priority,
        gateway::{ColdPolicy, Route},
        targets::Targets,
    };

    fn entry(name: &str, byte: u8, fallback: Option<&str>) -> Entry {
        Entry {
            route: Route {
                digest: Digest([byte; 32]),
                name: ModelName::parse(name).unwrap(),
                priority: Priority::Standard,
                max_concurrency: 4,
                critical_reserve: 0,
                parks: false,
                cold: ColdPolicy::Reject,
                rewarm_seconds: 1.0,
                targets: Targets::default(),
            },
            aliases: Vec::new(),
            created_unix_seconds: 7,
            held: false,
            fallback: fallback.map(|name| ModelName::parse(name).unwrap()),
        }
    }

    fn rest(entries: Vec<Entry>, body: &'static str) -> Result<Vec<String>, String> {
        let directory = Directory::default();
        directory.replace(entries, vec![]);
        let chain = chain(&directory, &Bytes::from_static(body.as_bytes())).map_err(|error| error.json())?;
        Ok(chain.map(|chain| chain.rest).unwrap_or_default())
    }

    #[test]
    fn models_name_their_fallbacks_without_loops_and_not_for_ever() {
        let asked = r#"{"model": "a"}"#;
        let ring = vec![entry("a", 1, Some("b")), entry("b", 2, Some("c")), entry("c", 3, Some("a"))];
        assert_eq!(rest(ring, asked).unwrap(), ["b", "c"]);
        assert_eq!(rest(vec![entry("a", 1, Some("gone"))], asked).unwrap(), [""; 0]);
        assert_eq!(rest(vec![entry("a", 1, Some("a"))], asked).unwrap(), [""; 0]);
        let names = ["a", "b", "c", "d", "e", "f", "g"];
        let long = names.iter().zip(1..).map(|(name, byte)| {
            let next = names.get(usize::from(byte)).copied();
            entry(name, byte, next)
        });
        assert_eq!(rest(long.collect(), asked).unwrap(), ["b", "c", "d", "e"]);
    }

    #[test]
    fn what_the_caller_names_goes_before_what_the_model_does() {
        let all = || vec![entry("a", 1, Some("b")), entry("b", 2, None), entry("c", 3, None)];
        assert_eq!(rest(all(), r#"{"model": "a", "models": ["c", "a", "c"]}"#).unwrap(), ["c"]);
        assert_eq!(rest(all(), r#"{"model": "a", "models": []}"#).unwrap(), [""; 0]);
        let unknown = rest(all(), r#"{"model": "a", "models": ["x"]}"#).unwrap_err();
        assert!(unknown.contains("model_not_found") && unknown.contains("\"param\":\"models\""), "{unknown}");
        assert!(rest(all(), r#"{"model": "a", "models": ["b","b","b","b","b"]}"#).unwrap_err().contains("at most 4"));
        assert_eq!(rest(all(), r#"{"model": "x"}"#).unwrap(), [""; 0], "the route says that it is unknown");
    }

    #[test]
    fn only_the_model_changes() {
        let changed = with_model(br#"{"n":  1.50, "model": "a", "models": ["b"], "x": "\u00e4"}"#, "b").unwrap();
        assert_eq!(String::from_utf8(changed).unwrap(), r#"{"model":"b","n":1.50,"x":"\u00e4"}"#);
    }
}
