//! The gateway's link to the worker in this process, and the worker's to the store.

use std::{collections::BTreeMap, sync::Arc, sync::PoisonError, sync::RwLock};
use warmset_core::{
    Digest, RequestId,
    inference::Work,
    kv::TrustDomain,
    worker::{CancelCause, LoadError},
};
use warmset_gateway::link::{Assignment, WorkerLink};
use warmset_store::Store;
use warmset_worker::{AgentHandle, Artifacts};

/// Whose KV every request may share: as long as there are no tenants, all callers are one trust domain.
pub(crate) const TRUST_DOMAIN: &str = "default";

/// Hands requests of the gateway to the worker of the same process.
pub(crate) struct LocalLink {
    agent: AgentHandle,
    /// None where no KV is kept: then requests share nothing.
    domain: Option<TrustDomain>,
}

impl LocalLink {
    pub(crate) fn new(agent: AgentHandle, keeps_kv: bool) -> Self {
        Self { agent, domain: keeps_kv.then(|| TrustDomain::named(TRUST_DOMAIN)) }
    }
}

impl WorkerLink for LocalLink {
    fn dispatch(&self, assignment: Assignment) {
        let Assignment { request, digest, tenant, class, mut work, replies } = assignment;
        if let Work::Generate(job) = &mut work {
            job.kv_domain = self.domain;
        }
        self.agent.assign(warmset_worker::Assignment { request, digest, tenant, class, work, replies });
    }

    fn cancel(&self, request: RequestId, cause: CancelCause) {
        self.agent.cancel(request, cause);
    }

    fn prewarm(&self, digest: Digest) {
        self.agent.prewarm(digest);
    }
}

/// Which stored files belong to which model, so that a load checks all of them first.
pub(crate) struct StoredArtifacts {
    store: Arc<Store>,
    files: RwLock<BTreeMap<Digest, Vec<Digest>>>,
}

impl StoredArtifacts {
    pub(crate) fn new(store: Arc<Store>) -> Self {
        Self { store, files: RwLock::default() }
    }

    /// Learns which files a model consists of. They never change.
    pub(crate) fn learn(&self, digest: Digest, files: Vec<Digest>) {
        self.files.write().unwrap_or_else(PoisonError::into_inner).insert(digest, files);
    }

    /// Forgets a model.
    pub(crate) fn forget(&self, digest: &Digest) {
        self.files.write().unwrap_or_else(PoisonError::into_inner).remove(digest);
    }
}

impl Artifacts for StoredArtifacts {
    fn verify(&self, digest: &Digest) -> Result<(), LoadError> {
        let files = self.files.read().unwrap_or_else(PoisonError::into_inner).get(digest).cloned();
        let unknown = || LoadError { message: format!("{digest} is not in the catalog"), permanent: true };
        files.ok_or_else(unknown)?.iter().try_for_each(|file| self.store.verify(file).map(drop))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_checks_every_file_of_its_model() {
        let directory = tempfile::tempdir().unwrap();
        let store = Arc::new(Store::open(&directory.path().join("store")).unwrap());
        let source = directory.path().join("a");
        std::fs::write(&source, b"weights").unwrap();
        let good = store.import_file(&source, &mut |_, _| {}).unwrap().sha256;
        let artifacts = StoredArtifacts::new(store);
        let digest = Digest([1; 32]);
        assert!(artifacts.verify(&digest).unwrap_err().permanent);
        artifacts.learn(digest, vec![good]);
        assert_eq!(artifacts.verify(&digest), Ok(()));
        artifacts.learn(digest, vec![good, Digest([2; 32])]);
        assert!(artifacts.verify(&digest).unwrap_err().message.contains("missing"));
        artifacts.forget(&digest);
        assert!(artifacts.verify(&digest).is_err());
    }
}
