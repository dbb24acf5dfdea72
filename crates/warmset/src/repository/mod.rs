//! The models of one installation: catalog and artifact store kept in step, for the server and for commands alike.

mod apply;
mod document;
mod fetching;
mod options;
mod runtimes;
mod shape;
mod take;
mod versions;

pub(crate) use apply::{Applied, Wish};
pub(crate) use document::{cold_excess_seconds, expectation_json, measurement_json, model_json};
pub(crate) use options::{
    ModelOptions, parse_accelerators, parse_cold, parse_engine, parse_model_name, parse_priority, slots,
};
pub(crate) use runtimes::{Runtimes, command_source};
pub(crate) use shape::Shape;
pub(crate) use versions::CONFIGURATION;

use anyhow::{Context, Result, anyhow};
use fetching::Fetches;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::{Arc, PoisonError},
};
use take::{Taken, Wanted};
use tokio::sync::Mutex;
use warmset_catalog::{Catalog, CatalogError, Measurement, Model, ModelSettings};
use warmset_core::{Digest, ModelName, rollout::Canary};
use warmset_engine::protocol::CommandRequest;
use warmset_source::{Environment, Fetcher, Gathered, Trust};
use warmset_store::{Manifest, ManifestFile, Store};

/// Hears of a copy's progress: `(done_bytes, total_bytes)`.
pub(crate) type Progress = Box<dyn FnMut(u64, u64) + Send>;

/// Catalog and store.
pub(crate) struct Repository {
    pub(crate) store: Arc<Store>,
    pub(crate) catalog: Catalog,
    /// What the configuration file defines; none where there is no server.
    pub(crate) runtimes: Runtimes,
    /// What is being fetched now.
    pub(crate) fetches: Fetches,
    fetcher: std::sync::RwLock<Arc<Fetcher>>,
    shapes: Shapes,
    /// One change at a time: a file that is being added is not yet referenced and must not be removed.
    changes: Mutex<()>,
}

/// What was read from files before: stored files never change, so they are read once. Bounded by the catalog.
#[derive(Clone, Default)]
struct Shapes(Arc<std::sync::Mutex<KnownShapes>>);

/// By digest, parallel sequences and accelerators.
type KnownShapes = BTreeMap<(Digest, u32, u32), Shape>;

impl Shapes {
    fn locked(&self) -> std::sync::MutexGuard<'_, KnownShapes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The shape of a model under its settings; a guess is not kept.
    fn of(&self, model: &Model, manifest: &Manifest, files: &[PathBuf]) -> Shape {
        let settings = &model.settings;
        let key = (model.digest, settings.parallel, settings.accelerators);
        if let Some(known) = self.locked().get(&key) {
            return known.clone();
        }
        match take::load_of(settings).and_then(|load| Shape::read(files, load)) {
            Ok(shape) => {
                self.locked().insert(key, shape.clone());
                shape
            }
            Err(reason) => {
                tracing::warn!(model = %model.name, "{reason}");
                Shape::guess(manifest.files.iter().map(|file| file.size_bytes).sum())
            }
        }
    }

    fn forget(&self, digest: &Digest) {
        self.locked().retain(|(known, _, _), _| known != digest);
    }
}

/// A model with all that is known to load it.
#[derive(Debug, Clone)]
pub(crate) struct Stored {
    pub(crate) model: Model,
    pub(crate) manifest: Manifest,
    pub(crate) files: Vec<PathBuf>,
    pub(crate) shape: Shape,
    /// What it must answer before callers get it.
    pub(crate) canary: Option<Canary>,
}

/// What came of adding a model.
pub(crate) struct Added {
    pub(crate) model: Model,
    /// It was there already; only settings that were said may have changed.
    pub(crate) existed: bool,
    /// What the name stood for before.
    pub(crate) replaced: Option<Model>,
    /// A version that no caller gets before it is promoted.
    pub(crate) candidate: Option<Digest>,
}

impl Added {
    /// Nothing had its name before.
    pub(crate) fn is_new(&self) -> bool {
        !self.existed && self.replaced.is_none() && self.candidate.is_none()
    }

    /// It was there, whatever became of its settings.
    fn same(model: Model) -> Self {
        Self { model, existed: true, replaced: None, candidate: None }
    }
}

/// On whose word a model enters the catalog.
enum Entering<'a> {
    /// The configuration file's: what it says of a name is what the name means.
    Configured,
    /// The file's as a running server reads it again: the name comes to mean it once it is loaded and has answered.
    Reloaded,
    /// Somebody's: a name that means something already goes on meaning that.
    By(&'a str),
}

impl Entering<'_> {
    fn by(&self) -> &str {
        match self {
            Self::Configured | Self::Reloaded => versions::CONFIGURATION,
            Self::By(by) => by,
        }
    }
}

impl Stored {
    /// How to start its server, if a command serves it: only as the configuration says now, and only if that is what its
    /// digest was taken of.
    pub(crate) fn command(&self, runtimes: &Runtimes) -> Option<CommandRequest> {
        let runtime = runtimes.get(self.model.settings.runtime.as_deref()?).ok()?;
        let same = self.manifest.runtime_sha256 == Some(runtimes::runtime_digest(runtime));
        let model = self.manifest.model.clone().unwrap_or_default();
        same.then(|| CommandRequest { runtime: runtime.clone(), name: self.model.name.to_string(), model })
    }
}

impl Repository {
    /// Opens both. The caller holds the lock of the data directory.
    pub(crate) async fn open(root: &Path, runtimes: Runtimes, sources: warmset_source::Settings) -> Result<Self> {
        let store = Arc::new(Store::open(&root.join("store"))?);
        let path = root.join("catalog.db");
        let location = path.to_str().with_context(|| format!("the path {} is not UTF-8", path.display()))?;
        let catalog = Catalog::open(location).await?;
        Ok(Self {
            store,
            catalog,
            runtimes,
            fetches: Fetches::default(),
            fetcher: std::sync::RwLock::new(Arc::new(Fetcher::new(sources, Environment::read()))),
            shapes: Shapes::default(),
            changes: Mutex::new(()),
        })
    }

    /// Adds a model: its files go into the store, then its row into the catalog. Adding the same again changes the
    /// settings that are said and nothing else; another file under the same name becomes a version of it.
    pub(crate) async fn add(
        &self,
        options: &ModelOptions,
        by: &str,
        trust: Trust,
        progress: Progress,
    ) -> Result<Added> {
        let name = parse_name(&options.name)?;
        if let Ok(known) = self.catalog.model(&name).await
            && take::means_the_same(options, &known)
            && self.holds(&known.manifest)
        {
            return self.change_what_is_said(options, &known).await;
        }
        self.take_in(options, trust, progress, &Entering::By(by)).await
    }

    /// Changes the settings that are said of a model that is there; the others stay.
    async fn change_what_is_said(&self, options: &ModelOptions, known: &Model) -> Result<Added> {
        self.change_settings(known, &said_over(options, &known.settings, known)?).await?;
        self.ensure_aliases(&known.name, &options.aliases).await?;
        Ok(Added::same(self.catalog.model(&known.name).await?))
    }

    /// Adds a model as the configuration file wants it: a name that meant something else, or other settings, give way.
    pub(crate) async fn ensure(&self, options: &ModelOptions, progress: Progress) -> Result<Added> {
        let name = parse_name(&options.name)?;
        if let Ok(model) = self.catalog.model(&name).await
            && let Some(settings) = take::unchanged(&self.runtimes, options, &model)
            && self.holds(&model.manifest)
        {
            self.change_settings(&model, &as_configured(options, settings, &model)).await?;
            self.ensure_aliases(&name, &options.aliases).await?;
            return Ok(Added::same(self.catalog.model(&name).await?));
        }
        self.take_in(options, Trust::Operator, progress, &Entering::Configured).await
    }

    /// Whether the store has every file of a model. If one is gone the model is taken from its source again.
    fn holds(&self, manifest: &str) -> bool {
        Manifest::from_canonical_json(manifest)
            .is_ok_and(|manifest| manifest.files.iter().all(|file| self.store.path_of(&file.sha256).is_file()))
    }

    /// The model that stands for this digest, if a file of it is gone from the store.
    pub(crate) async fn lost(&self, digest: &Digest) -> Result<Option<Model>> {
        let models = self.catalog.models().await?;
        Ok(models.into_iter().find(|model| model.digest == *digest && !self.holds(&model.manifest)))
    }

    /// Every file of every version, by model: also of those that a name does not stand for.
    pub(crate) async fn version_files(&self) -> Result<BTreeMap<ModelName, Vec<ManifestFile>>> {
        let mut files: BTreeMap<ModelName, Vec<ManifestFile>> = BTreeMap::new();
        for (name, manifest) in self.catalog.version_manifests().await? {
            files.entry(name).or_default().extend(Manifest::from_canonical_json(&manifest)?.files);
        }
        Ok(files)
    }

    async fn take_in(
        &self,
        options: &ModelOptions,
        trust: Trust,
        mut progress: Progress,
        entering: &Entering<'_>,
    ) -> Result<Added> {
        let name = parse_name(&options.name)?;
        let wanted = Wanted::of(options, &self.runtimes)?;
        // What takes hours is nobody's way: nothing is locked, and what comes is not in the store yet.
        let gathered = self.gather(&options.name, &wanted, trust, &mut progress).await?;
        let _one_at_a_time = self.changes.lock().await;
        let store = self.store.clone();
        let taken = tokio::task::spawn_blocking(move || take::take(&store, wanted, gathered, progress)).await?;
        let outcome = match taken {
            Ok(taken) => self.enter(&name, options, &taken, entering).await,
            Err(error) => Err(error),
        };
        if !matches!(&outcome, Ok(added) if !added.existed) {
            self.remove_unreferenced().await;
        }
        outcome
    }

    /// Lets other limits hold for what is fetched from now on.
    pub(crate) fn set_sources(&self, sources: warmset_source::Settings) {
        let fetcher = Arc::new(Fetcher::new(sources, Environment::read()));
        *self.fetcher.write().unwrap_or_else(PoisonError::into_inner) = fetcher;
    }

    /// Brings what is on other machines here, and says where the rest is.
    async fn gather(&self, name: &str, wanted: &Wanted, trust: Trust, progress: &mut Progress) -> Result<Gathered> {
        let Some(location) = wanted.location() else { return Ok(Gathered::default()) };
        let fetch = self.fetches.begin(name, location.to_string());
        let mut told = fetch.follow(progress);
        let fetcher = self.fetcher.read().unwrap_or_else(PoisonError::into_inner).clone();
        Ok(fetcher.gather(location, wanted.may_be_split(), trust, &self.store, &mut told).await?)
    }

    /// Writes what was taken into the catalog.
    async fn enter(
        &self,
        name: &ModelName,
        options: &ModelOptions,
        taken: &Taken,
        entering: &Entering<'_>,
    ) -> Result<Added> {
        if let Some(expected) = options.digest
            && expected != taken.digest
        {
            return Err(anyhow!("{} has digest {}, not {expected}: check the source", options.source, taken.digest));
        }
        let Ok(known) = self.catalog.model(name).await else {
            let new = taken.as_new(name, options, taken.settings.clone())?;
            self.catalog.add_model(&new, entering.by()).await?;
            self.ensure_aliases(name, &options.aliases).await?;
            let model = self.catalog.model(name).await?;
            return Ok(Added { model, existed: false, replaced: None, candidate: None });
        };
        if known.digest != taken.digest {
            return self.enter_version(&known, options, taken, entering).await;
        }
        let settings = match entering {
            Entering::Configured | Entering::Reloaded => as_configured(options, taken.settings.clone(), &known),
            Entering::By(_) => said_over(options, &taken.settings, &known)?,
        };
        self.change_settings(&known, &settings).await?;
        self.ensure_aliases(name, &options.aliases).await?;
        Ok(Added::same(self.catalog.model(name).await?))
    }

    /// Changes settings. What was measured under others that move its bytes no longer holds.
    async fn change_settings(&self, model: &Model, settings: &ModelSettings) -> Result<()> {
        let bytes = |settings: &ModelSettings| (settings.parallel, settings.accelerators);
        if bytes(&model.settings) != bytes(settings) {
            self.catalog.forget_measurements(&model.digest).await?;
        }
        Ok(self.catalog.set_settings(&model.name, settings).await?)
    }

    async fn ensure_aliases(&self, name: &ModelName, aliases: &[String]) -> Result<()> {
        let known = self.catalog.model(name).await?.aliases;
        for alias in aliases {
            let alias = parse_name(alias)?;
            if !known.contains(&alias) {
                self.catalog.add_alias(&alias, name, false).await?;
            }
        }
        Ok(())
    }

    /// Removes a model and the files that nothing else uses.
    pub(crate) async fn remove(&self, name: &ModelName) -> Result<Model> {
        let _one_at_a_time = self.changes.lock().await;
        let name = self.catalog.resolve(name).await?.name;
        let model = self.catalog.remove_model(&name).await?;
        self.shapes.forget(&model.digest);
        self.remove_unreferenced().await;
        Ok(model)
    }

    /// Pins or unpins a model.
    pub(crate) async fn pin(&self, name: &ModelName, pin: bool) -> Result<Model> {
        let model = self.catalog.resolve(name).await?;
        let settings = ModelSettings { pin, ..model.settings.clone() };
        self.change_settings(&model, &settings).await?;
        Ok(self.catalog.model(&model.name).await?)
    }

    /// All models with what is needed to load them.
    pub(crate) async fn all(&self) -> Result<Vec<Stored>> {
        let models = self.catalog.models().await?;
        let mut canaries = self.catalog.canaries().await?;
        let (store, shapes) = (self.store.clone(), self.shapes.clone());
        let read = move || {
            let models = models.into_iter();
            models
                .map(|model| {
                    let canary = canaries.remove(&model.digest);
                    stored(&store, &shapes, model, canary)
                })
                .collect()
        };
        tokio::task::spawn_blocking(read).await?
    }

    /// One model, by name or alias.
    pub(crate) async fn get(&self, name: &ModelName) -> Result<Stored> {
        let model = self.catalog.resolve(name).await?;
        let canary = self.catalog.version(&model.digest).await?.and_then(|version| version.canary);
        self.read(model, canary).await
    }

    /// What the store holds of a model.
    async fn read(&self, model: Model, canary: Option<Canary>) -> Result<Stored> {
        let (store, shapes) = (self.store.clone(), self.shapes.clone());
        tokio::task::spawn_blocking(move || stored(&store, &shapes, model, canary)).await?
    }

    /// What was measured of a model, on every kind of machine.
    pub(crate) async fn measurements(&self, digest: &Digest) -> Result<Vec<(String, Measurement)>> {
        let all = self.catalog.measurements().await?;
        let own = all.into_iter().filter(|(known, _, _)| known == digest);
        Ok(own.map(|(_, kind, measurement)| (kind, measurement)).collect())
    }

    /// Removes files that no model refers to. Failing costs only disk space, so it never fails a change.
    async fn remove_unreferenced(&self) {
        let result = async {
            let mut referenced = BTreeSet::new();
            for manifest in self.catalog.manifests().await? {
                referenced.extend(Manifest::from_canonical_json(&manifest)?.files.iter().map(|file| file.sha256));
            }
            let store = self.store.clone();
            anyhow::Ok(tokio::task::spawn_blocking(move || store.remove_unreferenced(&referenced)).await??)
        };
        match result.await {
            Ok(removed) if removed.files > 0 => tracing::info!(removed.files, removed.bytes, "removed unused files"),
            Ok(_) => {}
            Err(error) => tracing::warn!("cannot remove unused files: {error:#}"),
        }
    }
}

/// What the configuration file makes of a known model: everything as the file says or by default, except that a pin of
/// which it says nothing stays as the last command left it.
fn as_configured(options: &ModelOptions, settings: ModelSettings, known: &Model) -> ModelSettings {
    ModelSettings { pin: options.pin.unwrap_or(known.settings.pin), ..settings }
}

/// The settings of a known model with what is said now; `taken` is how its files were had.
fn said_over(options: &ModelOptions, taken: &ModelSettings, known: &Model) -> Result<ModelSettings> {
    let engine = parse_engine(&taken.engine).map_err(|reason| anyhow!(reason))?;
    let said = options.settings_over(engine, known.settings.clone()).map_err(|reason| anyhow!(reason))?;
    Ok(ModelSettings {
        source_stamp: taken.source_stamp.clone(),
        pinned_source: taken.pinned_source.clone(),
        fetch_seconds: taken.fetch_seconds,
        ..said
    })
}

/// Reads what the store holds of a model.
fn stored(store: &Store, shapes: &Shapes, model: Model, canary: Option<Canary>) -> Result<Stored> {
    let manifest = Manifest::from_canonical_json(&model.manifest)
        .with_context(|| format!("the catalog entry of {} is broken", model.name))?;
    let files: Vec<PathBuf> = manifest.files.iter().map(|file| store.path_of(&file.sha256)).collect();
    let shape = shapes.of(&model, &manifest, &files);
    Ok(Stored { model, manifest, files, shape, canary })
}

/// Parses a name given by a user.
pub(crate) fn parse_name(text: &str) -> Result<ModelName> {
    ModelName::parse(text).map_err(|error| anyhow!("{text:?} is no model name: {error}"))
}

/// Whether an error says that the catalog has no such model.
pub(crate) fn is_unknown(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(CatalogError::UnknownModel(_)))
}
