//! What other tools keep on this machine.

use crate::server::{file, sha256};
use serde_json::json;
use std::{path::Path, sync::Arc};
use warmset_source::{Environment, FetchError, Fetcher, Gathered, Location, Part, Settings, Trust, list_ollama};
use warmset_store::Store;

/// Writes a model as Ollama does.
fn ollama_model(root: &Path, name: &str, kinds: &[&str], bytes: &[u8]) {
    let digest = sha256(bytes);
    std::fs::create_dir_all(root.join("blobs")).unwrap();
    std::fs::write(root.join("blobs").join(format!("sha256-{}", digest.hex())), bytes).unwrap();
    let layers: Vec<_> = kinds
        .iter()
        .map(|kind| json!({"mediaType": format!("application/vnd.ollama.image.{kind}"), "digest": digest.to_string(), "size": bytes.len()}))
        .collect();
    let manifest = json!({"schemaVersion": 2, "mediaType": "application/vnd.docker.distribution.manifest.v2+json", "layers": layers});
    let path = root.join("manifests").join(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, manifest.to_string()).unwrap();
}

async fn gather(root: &Path, source: &str) -> Result<Gathered, FetchError> {
    let store = Arc::new(Store::open(&root.join("store")).unwrap());
    let environment =
        Environment { ollama_models: vec![root.join("absent"), root.join("ollama")], ..Environment::default() };
    let fetcher = Fetcher::new(Settings::default(), environment);
    fetcher.gather(&Location::parse(source).unwrap(), true, Trust::Caller, &store, &mut |_, _| {}).await
}

#[tokio::test]
async fn an_ollama_store_is_read_and_its_digests_are_known() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("ollama");
    ollama_model(&root, "registry.ollama.ai/library/llama3/8b", &["model", "template", "license"], &file(1000));
    ollama_model(&root, "hf.co/me/tuned/latest", &["model", "adapter"], &file(1001));
    ollama_model(&root, "registry.ollama.ai/library/empty/latest", &["params"], &file(1002));
    let gathered = gather(directory.path(), "ollama://llama3:8b").await.unwrap();
    let [Part::Local { path, sha256: Some(known) }] = &gathered.parts[..] else { panic!("{gathered:?}") };
    assert_eq!((std::fs::read(path).unwrap(), *known), (file(1000), sha256(&file(1000))));
    let refused = async |source: &str| gather(directory.path(), source).await.unwrap_err().to_string();
    assert!(refused("ollama://llama3").await.contains("no such model"));
    assert!(refused("ollama://hf.co/me/tuned").await.contains("adapter"));
    assert!(refused("ollama://empty").await.contains("names no weights"));

    let listed = list_ollama(&[directory.path().join("absent"), root.clone()]).unwrap();
    let shown: Vec<_> =
        listed.iter().map(|model| (model.name.to_string(), model.size_bytes, model.left_behind.join(" "))).collect();
    let expected =
        [("hf.co/me/tuned:latest", 1001, "adapter"), ("empty:latest", 0, "params"), ("llama3:8b", 1000, "template")];
    assert_eq!(shown, expected.map(|(name, size, left)| (name.to_owned(), size, left.to_owned())));
    assert!(list_ollama(&[directory.path().join("absent")]).unwrap_err().to_string().contains("OLLAMA_MODELS"));

    std::fs::write(path, b"short").unwrap();
    assert!(refused("ollama://llama3:8b").await.contains("pull it again"));
    std::fs::write(root.join("manifests/registry.ollama.ai/library/llama3/8b"), "{").unwrap();
    assert!(refused("ollama://llama3:8b").await.contains("its manifest is broken"));
    let traversal = json!({"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../../etc/passwd", "size": 1}]});
    std::fs::write(root.join("manifests/registry.ollama.ai/library/llama3/8b"), traversal.to_string()).unwrap();
    assert!(refused("ollama://llama3:8b").await.contains("its manifest is broken"));
}
